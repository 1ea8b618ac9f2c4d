"""`vllm-exl3 inspect` on golden, odd and bad packs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.conftest import DATA
from tests.tiny_pack import llama
from vllm_exl3.cli import app
from vllm_exl3.pack import Pack
from vllm_exl3.pack.wording import format_bytes

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "160"}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_exl3.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )


def _inspect(folder: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", str(folder), *options], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def _json(folder: Path) -> dict:
    code, output = _inspect(folder, "--json")
    found = json.loads(output)
    assert code == (1 if found["faults"] else 0)
    return found


def test_golden_pack_as_json(golden_pack: Path) -> None:
    found = _json(golden_pack)
    pack = Pack.open(golden_pack)
    assert found["faults"] == found["warnings"] == []
    assert found["bytes"] == pack.nbytes == sum(found["bytes_by_fate"]["served"].values())
    assert sum(row["tensors"] for row in found["bits"]) == len(pack.linears)
    assert sum(row["count"] for row in found["shapes"]) == len(pack.linears)
    assert sum(row["bytes"] for row in found["bits"]) == sum(linear.nbytes for linear in pack.linears.values())
    assert sum(row["bytes"] for row in found["dense"]) == sum(tensor.nbytes for tensor in pack.dense.values())
    kinds = found["module_kinds"]
    assert sum(row["bytes"] for row in kinds) == pack.nbytes
    assert {row["kind"] for row in kinds} >= {"embedding", "attention", "head", "norms and others"}
    assert sum(row["modules"] for row in kinds if row["kind"] == "routed experts") == sum(
        len(roles) for group in pack.experts.values() for roles in group.members.values()
    )
    declared = found["declared"]
    assert abs(found["average_bits"]["body"] - declared["bits"]) < 0.01
    assert found["average_bits"]["head"] == declared["head_bits"]
    assert [row["label"] for row in found["codebooks"]] == [declared["codebook"]]
    assert [row["degree"] for row in found["tensor_parallel"]] == [1, 2, 3, 4, 6, 8, 16]
    assert bool(found["expert_parallel"]) == bool(pack.experts)


def test_golden_pack_as_tables(golden_pack: Path) -> None:
    code, output = _inspect(golden_pack)
    assert code == 0
    for part in ("Bits per weight", "Codebooks", "Dense modules", "Every stored byte", "Tensor parallel", "No faults."):
        assert part in output
    assert Pack.open(golden_pack).quantization["version"] in output


def test_padding_experts_and_embeddings_are_shown() -> None:
    _, output = _inspect(DATA / "packs/llama_odd-4.0-mul1")
    assert "320 padded to 384" in output and "192" not in output.split("Dense")[0]
    found = _json(DATA / "packs/qwen3-2.25-mul1-emb4")
    assert found["embeddings"] == [
        {"module": "model.embed_tokens", "format": "row code, K = 4", "bits": 4, "rows": 640, "groups": 1,
         "bytes": 640 * 65 * 2 + 512}
    ]  # fmt: skip
    _, output = _inspect(DATA / "packs/qwen3-2.25-mul1-emb4")
    by_bits = output.partition("Bits per weight")[2].partition("Codebooks")[0]
    assert [line.split()[0] for line in by_bits.splitlines()[2:5]] == ["2", "2.5", "5"]
    assert "row code, K = 4" in output and "unknown" not in output
    assert {row["label"] for row in found["bits"]} == {"2", "2.5", "5"}


def test_mixture_of_experts_is_summarised(tmp_path: Path) -> None:
    draft = llama()
    draft.config["num_experts"] = 3
    for expert in range(3):
        for role in ("gate_proj", "up_proj", "down_proj"):
            draft.add_linear(f"model.layers.0.mlp.experts.{expert}.{role}", 128, 128, bits=2 if expert else 4)
    found = _json(draft.write(tmp_path))
    experts = found["experts"]
    assert (experts["layers"], experts["experts"], experts["roles"]) == (1, [3], ["gate", "up", "down"])
    assert experts["bits"] == {"2": 6, "4": 3}
    _, output = _inspect(tmp_path)
    assert "1 layer of 3 experts, gate/up/down: 6 at K = 2, 3 at K = 4" in output


def test_skipped_and_unknown_bytes_are_shown(tmp_path: Path) -> None:
    draft = llama()
    draft.tensors["__align_pad__.0.0"] = ("U8", np.zeros(1024))
    draft.tensors["model.layers.0.mystery.zeros"] = ("U8", np.zeros(512))
    folder = draft.write(tmp_path)
    (folder / "consolidated.safetensors").write_bytes(b"")
    found = _json(folder)["bytes_by_fate"]
    assert [(row["rule"], row["bytes"]) for row in found["skipped"]] == [("alignment filler", 1024)]
    assert found["unknown"] == {"tensors": 1, "bytes": 512, "names": ["model.layers.0.mystery.zeros"]}
    assert set(found["ignored_files"]) == {"consolidated.safetensors"}
    _, output = _inspect(folder)
    for part in ("alignment filler", "model.layers.0.mystery.zeros", "consolidated.safetensors", "WARNING"):
        assert part in output


def test_contradictions_are_shown_with_both_values(tmp_path: Path) -> None:
    draft = llama()
    draft.config["quantization_config"]["bits"] = 4.5
    code, output = _inspect(draft.write(tmp_path))
    assert code == 0 and "bits 4.5 (headers: 3.00 on average)" in " ".join(output.split())


def test_pack_without_a_declaration_is_told_the_flag(tmp_path: Path) -> None:
    draft = llama()
    del draft.config["quantization_config"]
    code, output = _inspect(draft.write(tmp_path))
    assert code == 0 and "--quantization exl3" in output


def test_every_fault_is_listed_with_four_parts(tmp_path: Path) -> None:
    draft = llama()
    for name in ("q_proj", "k_proj"):
        draft.tensors[f"model.layers.0.self_attn.{name}.mul1"] = ("I32", np.array(7))
    code, output = _inspect(draft.write(tmp_path))
    assert code == 1
    assert output.count("FAULT") == output.count("found ") == output.count("to do") == 2
    assert "model.layers.0.self_attn.k_proj.mul1" in output and "0x83DCD12D" in output
    assert len(_json(tmp_path)["faults"]) == 2


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_pack_that_cannot_be_opened(options: tuple[str, ...], tmp_path: Path) -> None:
    folder = llama().write(tmp_path)
    os.truncate(folder / "model.safetensors", 5000)
    done = _run("inspect", str(folder), *options)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    if options:
        (fault,) = json.loads(done.stdout)["faults"]
        assert set(fault) == {"found", "expected", "where", "remedy"} and "model.safetensors" in fault["where"]
    else:
        for part in ("Where:", "Found:", "Expected:", "What to do:", "model.safetensors"):
            assert part in done.stderr


def test_missing_folder_is_no_traceback() -> None:
    done = _run("inspect", "/no/such/folder")
    assert done.returncode == 1 and "no readable folder" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"], ["inspect", "PACK"]])
def test_neither_torch_nor_vllm_is_imported(arguments: list[str]) -> None:
    arguments = [str(DATA / "packs/phi3-5.0-mul1") if argument == "PACK" else argument for argument in arguments]
    script = (
        "import sys; from vllm_exl3.cli import app\n"
        f"try: app({arguments!r})\n"
        "except SystemExit as done: assert not done.code\n"
        "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert done.stdout.strip().endswith("[]")
    assert "inspect" in done.stdout or "phi3" in done.stdout


def test_unknown_command_and_missing_argument_are_usage_errors() -> None:
    assert CliRunner().invoke(app, ["no-such-command"]).exit_code == 2
    assert CliRunner().invoke(app, ["inspect"]).exit_code == 2


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (5 * 2**30, "5 GiB"), (3 * 2**50, "3072 TiB")],
)
def test_sizes(size: int, text: str) -> None:
    assert format_bytes(size) == text

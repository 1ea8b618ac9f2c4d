"""``embed-quant``: what it writes, refuses, leaves alone, and that a killed run leaves nothing."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from tests.tiny_pack import Draft, Spec, write_safetensors
from vllm_exl3.cli import app
from vllm_exl3.pack import Exl3PackError, Pack
from vllm_exl3.pack.bfloat16 import from_bfloat16
from vllm_exl3.pack.check import check
from vllm_exl3.pack.scaled_rows import dequantize_rows
from vllm_exl3.plan.survey import survey
from vllm_exl3.tools import table_writer
from vllm_exl3.tools.table_writer import quantize_embedding

PACKS = Path(__file__).parents[1] / "data" / "packs"
KEY = "model.embed_tokens"


def plain(folder: Path, *, width: int = 200, dtype: str = "F32", seed: int = 0) -> Path:
    """A model of no particular kind in two files with an index, and what lies beside it."""
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((100, width)).astype(np.float32)
    tensors: dict[str, Spec] = {
        "model.norm.weight": ("F16", np.arange(5)),
        f"{KEY}.weight": (dtype, table.view(np.uint32) >> 16 if dtype == "BF16" else table),
        "odd": ("U8", np.arange(3)),
        "lm_head.weight": ("F32", np.arange(6)),
    }
    draft = Draft(tensors, {"architectures": ["X"]}, index=True)
    draft.file_of = dict.fromkeys(tensors, "model-00001-of-00002.safetensors")
    draft.file_of["lm_head.weight"] = "model-00002-of-00002.safetensors"
    draft.write(folder)
    (folder / "sub").mkdir()
    (folder / "sub" / "notes.txt").write_text("kept")
    return folder


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("width", [128, 201])
def test_only_the_table_changes(bits: int, dtype: str, width: int, tmp_path: Path) -> None:
    source, target = plain(tmp_path / "source", width=width, dtype=dtype), tmp_path / "target"
    result = quantize_embedding(source, target, bits)
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    _, tensors = header_and_bytes(target / first)
    before_header, before = header_and_bytes(source / first)
    assert set(tensors) == {"model.norm.weight", "odd", f"{KEY}.qrows", f"{KEY}.scales"}
    for name in ("model.norm.weight", "odd"):
        assert tensors[name] == before[name]
    stored = before_header[f"{KEY}.weight"]["dtype"]
    raw = np.frombuffer(before[f"{KEY}.weight"], {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}[stored])
    wanted = (from_bfloat16(raw) if stored == "BF16" else raw.astype(np.float32)).reshape(100, width)
    codes = np.frombuffer(tensors[f"{KEY}.qrows"], "u1" if bits == 4 else "i1").reshape(100, -1)
    scales = tensors[f"{KEY}.scales"]
    scales = from_bfloat16(np.frombuffer(scales, "<u2")) if bits == 4 else np.frombuffer(scales, "<f4")
    error = dequantize_rows(codes, scales.reshape(100, -1), width) - wanted
    relative = np.linalg.norm(error) / np.linalg.norm(wanted)
    assert relative == pytest.approx(result.relative_error, rel=1e-4) and relative < (0.12 if bits == 4 else 0.01)
    assert (target / second).samefile(source / second)
    assert (target / "sub" / "notes.txt").read_text() == "kept"
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {**dict.fromkeys(tensors, first), "lm_head.weight": second}
    config = json.loads((target / "config.json").read_text())
    assert config == {
        "architectures": ["X"],
        "quantized_embeddings": {KEY: {"bits": bits, "rows": 100, "width": width}},
    }
    assert not list(tmp_path.glob(".*"))


def header_and_bytes(path: Path) -> tuple[dict, dict[str, bytes]]:
    """Independent of the package's reader: the header, and each tensor's bytes."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, {
        name: data[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]]
        for name, entry in header.items()
    }


def test_other_readers_load_the_file_and_its_tensors_are_aligned(tmp_path: Path) -> None:
    source = plain(tmp_path / "source", width=201)
    quantize_embedding(source, tmp_path / "target", 8)
    path = tmp_path / "target" / "model-00001-of-00002.safetensors"
    tensors = load_file(path)
    assert tensors[f"{KEY}.qrows"].shape == (100, 201) and tensors[f"{KEY}.qrows"].dtype == np.int8
    header, _ = header_and_bytes(path)
    size = {"F32": 4, "F16": 2, "U8": 1, "I8": 1}
    assert all(entry["data_offsets"][0] % size[entry["dtype"]] == 0 for entry in header.values())


@pytest.mark.parametrize("bits", [4, 8])
def test_an_exl3_pack_stays_one_without_a_warning(bits: int, tmp_path: Path) -> None:
    target = tmp_path / "target"
    quantize_embedding(PACKS / "llama_odd-4.0-mul1", target, bits)
    pack = Pack.open(target)
    assert pack.embeddings[KEY].bits == bits and KEY not in pack.dense
    assert check(pack) == []
    (row,) = survey(pack)["embeddings"]
    assert (row["format"], row["bits"]) == (f"int{bits}", bits)


def test_copies_instead_of_links_when_asked(tmp_path: Path) -> None:
    source = plain(tmp_path / "source")
    quantize_embedding(source, tmp_path / "target", 8, copy=True)
    name = "model-00002-of-00002.safetensors"
    assert not (tmp_path / "target" / name).samefile(source / name)
    assert (tmp_path / "target" / name).read_bytes() == (source / name).read_bytes()


def test_copies_where_links_are_impossible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("another file system")

    monkeypatch.setattr(os, "link", refuse)
    quantize_embedding(plain(tmp_path / "source"), tmp_path / "target", 8)
    assert (tmp_path / "target" / "model-00002-of-00002.safetensors").stat().st_nlink == 1


def test_symbolic_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    source, snapshot = plain(tmp_path / "source"), tmp_path / "snapshot"
    snapshot.mkdir()
    for path in source.iterdir():
        if path.is_file():
            (snapshot / path.name).symlink_to(path)
    quantize_embedding(snapshot, tmp_path / "target", 8)
    assert not any(path.is_symlink() for path in (tmp_path / "target").iterdir())


def test_a_target_inside_the_source_is_refused(tmp_path: Path) -> None:
    source = plain(tmp_path / "source")
    before = sorted(source.rglob("*"))
    for target in (source / "new", source / "deep" / "er", tmp_path / "other" / ".." / "source" / "new"):
        with pytest.raises(Exl3PackError, match="inside the source"):
            quantize_embedding(source, target, 8)
    assert sorted(source.rglob("*")) == before


def test_pipes_in_the_folder_are_not_waited_for(tmp_path: Path) -> None:
    source = plain(tmp_path / "source")
    for name in ("more.safetensors", "pipe"):
        os.mkfifo(source / name)
    quantize_embedding(source, tmp_path / "target", 8, copy=True)
    assert not any(path.is_fifo() for path in (tmp_path / "target").iterdir())


def test_a_link_that_leads_nowhere_stays_one_unless_it_should_hold_weights(tmp_path: Path) -> None:
    source = plain(tmp_path / "source")
    (source / "README.md").symlink_to("../../nowhere")
    quantize_embedding(source, tmp_path / "target", 8)
    assert (tmp_path / "target" / "README.md").readlink() == Path("../../nowhere")
    (source / "model-00003-of-00003.safetensors").symlink_to("../../nowhere")
    with pytest.raises(Exl3PackError, match=r"00003-of-00003.*cannot be read"):
        quantize_embedding(source, tmp_path / "again", 8)


_SPOILT_JSON = {
    "config.json": ("", "[]", "{", '{"a": "\\ud800"}', '{"quantized_embeddings": []}', "\udcff"),
    "model.safetensors.index.json": ("1.5", "[]", '{"weight_map": 1}', '{"weight_map": ["a"]}'),
    "quantization_config.json": ('"x"', '{"tensor_storage": 1}'),
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in _SPOILT_JSON.items() for text in texts])
def test_json_that_cannot_be_rewritten_is_refused_before_anything_is_written(
    name: str, text: str, tmp_path: Path
) -> None:
    source = plain(tmp_path / "source")
    (source / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(Exl3PackError, match=name):
        quantize_embedding(source, tmp_path / "target", 8, progress=lambda *_: pytest.fail("quantized"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"text_config": {"x": [NaN, Infinity]}}'),
        ("model.safetensors.index.json", '{"metadata": 7}'),
        ("model.safetensors.index.json", '{"metadata": {"total_size": "much"}, "weight_map": {}}'),
        ("quantization_config.json", '{"tensor_storage": {"model.embed_tokens": 1, "x": [1]}}'),
        ("quantization_config.json", "{}"),
    ],
)
def test_json_that_says_something_else_is_kept(name: str, text: str, tmp_path: Path) -> None:
    source = plain(tmp_path / "source")
    (source / name).write_text(text)
    quantize_embedding(source, tmp_path / "target", 8)
    before, after = (json.loads((folder / name).read_text()) for folder in (source, tmp_path / "target"))
    assert before.keys() <= after.keys()


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    source = plain(tmp_path / "source")
    (source / "config.json").unlink()
    with pytest.raises(Exl3PackError, match=r"no config\.json"):
        quantize_embedding(source, tmp_path / "target", 8)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_existing_target_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    result = CliRunner().invoke(
        app, ["embed-quant", str(PACKS / "llama_odd-4.0-mul1"), str(tmp_path / "target"), "--bits", "8"]
    )
    assert isinstance(result.exception, Exl3PackError) and "existing" in str(result.exception)
    assert not list((tmp_path / "target").iterdir())


@pytest.mark.parametrize(
    ("name", "found"),
    [("qwen3-2.25-mul1-emb4", "EXL3-coded rows, which is quantized already"), ("no-such-folder", "no such folder")],
)
def test_what_has_no_16_bit_table_is_refused(name: str, found: str, tmp_path: Path) -> None:
    with pytest.raises(Exl3PackError, match=found):
        quantize_embedding(PACKS / name, tmp_path / "target", 4)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", [None, KEY])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_table_is_not_quantized_twice(bits: int, module: str | None, tmp_path: Path) -> None:
    quantize_embedding(plain(tmp_path / "source"), tmp_path / "once", bits)
    with pytest.raises(Exl3PackError, match=f"{KEY} as int{bits} rows, which is quantized already.*made from"):
        quantize_embedding(tmp_path / "once", tmp_path / "twice", 4, module=module)
    assert not (tmp_path / "twice").exists()


def test_an_unusual_name_is_given_by_hand(tmp_path: Path) -> None:
    tensors: dict[str, Spec] = {"tok.table.weight": ("F32", np.ones((4, 128)))}
    Draft(tensors, {}).write(tmp_path / "source")
    with pytest.raises(Exl3PackError, match=r"0 token embeddings.*--module"):
        quantize_embedding(tmp_path / "source", tmp_path / "target", 8)
    with pytest.raises(Exl3PackError, match=r"no tensor tok\.tables\.weight"):
        quantize_embedding(tmp_path / "source", tmp_path / "target", 8, module="tok.tables")
    assert quantize_embedding(tmp_path / "source", tmp_path / "target", 8, module="tok.table").shape == (4, 128)


def test_nan_is_refused_with_its_place_and_leaves_nothing(tmp_path: Path) -> None:
    source = plain(tmp_path / "source")
    tensors: dict[str, Spec] = {f"{KEY}.weight": ("F32", np.where(np.arange(800).reshape(4, 200) == 650, np.nan, 1.0))}
    write_safetensors(source / "model-00001-of-00002.safetensors", tensors)
    with pytest.raises(Exl3PackError, match="row 3 holds NaN"):
        quantize_embedding(source, tmp_path / "target", 4)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_command_prints_size_and_error(tmp_path: Path) -> None:
    source = plain(tmp_path / "source")
    result = CliRunner().invoke(app, ["embed-quant", str(source), str(tmp_path / "target"), "--bits", "8"])
    assert result.exit_code == 0, result.output
    assert "100 x 200" in result.output and "relative error" in result.output
    assert "verifying" not in result.output  # what ends within two seconds shows no progress in a log


def test_bytes_that_change_on_disk_fail_the_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = table_writer._Plan.verify

    def spoil_first(plan: table_writer._Plan, progress: table_writer.Progress) -> float:
        file = plan.folder / plan.table.file
        data = bytearray(file.read_bytes())
        data[-1] ^= 1  # the table comes last
        file.write_bytes(data)
        return verify(plan, progress)

    monkeypatch.setattr(table_writer._Plan, "verify", spoil_first)
    with pytest.raises(Exl3PackError, match=r"(row 99|plain copy)"):
        quantize_embedding(plain(tmp_path / "source"), tmp_path / "target", 4)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def sparse(folder: Path, rows: int, width: int) -> Path:
    """A table of zeros that takes no disk space."""
    folder.mkdir()
    entry = {"dtype": "BF16", "shape": [rows, width], "data_offsets": [0, rows * width * 2]}
    header = json.dumps({f"{KEY}.weight": entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + rows * width * 2)
    (folder / "config.json").write_text("{}")
    return folder


def command(source: Path, target: Path) -> list[str]:
    return [sys.executable, "-m", "vllm_exl3.tools.embed_quant", str(source), str(target), "--bits", "4"]


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    """Far below 1 GiB whatever the rows: only a block of rows is kept."""
    source = sparse(tmp_path / "source", 4000, 8192)
    # The kernel's peak of this address space; a child's ru_maxrss would begin with its parent's memory.
    script = (
        "import pathlib, sys; from vllm_exl3.tools.table_writer import quantize_embedding as run; "
        "run(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), 4); print(open('/proc/self/status').read())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-c", script, str(source), str(tmp_path / "target")]
    output = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True).stdout
    peak = next(int(line.split()[1]) for line in output.splitlines() if line.startswith("VmHWM"))
    assert peak < 300 << 10, "kibibytes"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_leaves_no_half_pack(number: signal.Signals, tmp_path: Path) -> None:
    source = sparse(tmp_path / "source", 40000, 8192)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command(source, tmp_path / "target"), env=environment, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob(".target.embed-quant-*/*.safetensors")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=60) != 0
    assert not (tmp_path / "target").exists()
    if number == signal.SIGINT:
        assert [path.name for path in tmp_path.iterdir()] == ["source"]

"""AWQ and GPTQ folders beside an EXL3 pack, made here by rounding a random Llama."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.verify import damage
from vllm_exl3.cli import app
from vllm_exl3.pack import Exl3PackError, Pack
from vllm_exl3.tools.pack_writer import PackTensor, write_safetensors
from vllm_exl3.verify.int4_folder import Int4Folder
from vllm_exl3.verify.weights import DenseFolder

NAME = "llama_tied-3.0-mul1"
GROUP = 32
FORMATS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    "gptq8": {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": True, "sym": False},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    "gptq_sym": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
}


def _packed(values: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Along the last axis, lowest bits first."""
    parts = values.astype(np.uint64).reshape(*values.shape[:-1], -1, 32 // bits)
    words = sum(parts[..., place] << np.uint64(bits * place) for place in range(32 // bits))
    return np.asarray(words).astype(np.uint32).view(np.int32)


def _awq_packed(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ: column order[i] goes into nibble i
    return _packed(values.reshape(values.shape[0], -1, 8)[..., order].reshape(values.shape), 4)


def quantized(source: Path, folder: Path, form: str) -> dict[str, np.ndarray[Any, Any]]:
    """Write the model in a format; returns what its linears then are, ``[out, in]``."""
    config, random = FORMATS[form], np.random.default_rng(0)
    stored, levels, method = DenseFolder(source), 2 ** config["bits"] - 1, config["quant_method"]
    tensors: dict[str, tuple[str, np.ndarray[Any, Any]]] = {}
    expected = {}
    for name in stored.names():
        weight = stored.read(name).T
        if "proj" not in name:
            tensors[name] = "F16", weight.T.astype(np.float16)
            continue
        group = np.arange(weight.shape[0]) // GROUP
        if config.get("desc_act"):
            group = random.permutation(group)
        groups = [weight[group == number] for number in range(group.max() + 1)]
        low, high = (np.stack([edge(part, axis=0) for part in groups]) for edge in (np.min, np.max))
        scales = ((high - low) / levels).astype(np.float16)
        zeros = np.clip(np.round(-low / scales), 1, levels).astype(np.int32)
        codes = np.clip(np.round(weight / scales[group].astype(np.float32)) + zeros[group], 0, levels).astype(np.int32)
        if config.get("sym"):
            zeros = np.full_like(zeros, 8)
            scales = (np.maximum(high, -low) / 7).astype(np.float16)
            codes = np.clip(np.round(weight / scales[group].astype(np.float32)) + 8, 0, levels).astype(np.int32)
        expected[name] = ((codes - zeros[group]) * scales[group].astype(np.float32)).T
        key = name.removesuffix(".weight")
        if method == "awq":
            parts = {"qweight": _awq_packed(codes), "qzeros": _awq_packed(zeros)}
        else:
            stored_zeros = zeros - (config.get("checkpoint_format") != "gptq_v2")
            parts = {"qweight": _packed(codes.T, config["bits"]).T, "qzeros": _packed(stored_zeros, config["bits"])}
            parts["g_idx"] = group.astype(np.int32)
        tensors |= {f"{key}.{part}": ("I32", np.ascontiguousarray(value)) for part, value in parts.items()}
        tensors[f"{key}.scales"] = "F16", scales
    folder.mkdir()
    write_safetensors(
        folder / "model.safetensors",
        [
            PackTensor(name, dtype, value.shape, functools.partial(np.array, value))
            for name, (dtype, value) in tensors.items()
        ],
    )
    model = json.loads((source / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(model))
    return expected


def _less_sure(folder: Path) -> Path:
    """Scale the last norm of a model down: these random models are sure of every token, which leaves no divergence."""
    tensor = Pack.open(folder).tensors["model.norm.weight"]
    assert tensor.dtype == "F16"
    values = np.frombuffer(damage.raw(folder, tensor), "<f2")
    damage.overwrite(folder, tensor, (values / 64).astype("<f2").tobytes())
    return folder


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _less_sure(damage.copy_of(NAME, tmp_path_factory.mktemp("pack")))


@pytest.fixture(scope="module")
def source(pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damage.source_of(pack, tmp_path_factory.mktemp("source") / "model")


@pytest.mark.parametrize("form", FORMATS)
def test_every_linear_is_what_was_stored(source: Path, tmp_path: Path, form: str) -> None:
    expected = quantized(source, tmp_path / form, form)
    folder = Int4Folder(tmp_path / form, FORMATS[form])
    assert set(folder.names()) == set(DenseFolder(source).names()) and len(expected) == 14
    for name, weight in expected.items():
        assert np.array_equal(folder.read(name), weight), name
        original = DenseFolder(source).read(name)
        assert np.abs(weight - original).max() < 0.2 * np.abs(original).max()


@pytest.mark.slow
def test_verify_compares_a_pack_with_both(pack: Path, source: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    for form in ("awq", "gptq", "gptq8"):
        quantized(source, tmp_path / form, form)
    options = ["--text", text, "--tokens", 512, "--json", report]
    options += [word for form in ("awq", "gptq", "gptq8") for word in ("--compare", tmp_path / form)]
    words = ["verify", pack, "--no-backends", "--against", source, *options]
    result = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    found = {name: row["kl"]["mean"] for name, row in json.loads(report.read_text())["divergence"].items()}
    assert 0 < found["gptq8"] < found["gptq"] and found["awq"] == pytest.approx(found["gptq"], rel=1e-3)
    assert found["gptq"] < found[NAME]  # four bits and three


@pytest.mark.slow
@pytest.mark.parametrize("form", ["awq", "gptq_sym"])
def test_vllm_reads_the_same_weights(source: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout is the public one: vLLM's own loader gives the same logits."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # which the next import would leave set
    torch = pytest.importorskip("torch")
    from vllm import SamplingParams

    from tests.serving.engine import engine
    from vllm_exl3.verify.judge import final_states

    quantized(source, tmp_path / form, form)
    config = json.loads((tmp_path / form / "config.json").read_text())
    ids = torch.randint(0, config["vocab_size"], (1, 24), generator=torch.Generator().manual_seed(0))
    states = final_states(Int4Folder(tmp_path / form, FORMATS[form]), config, ids)
    expected = states.log_probabilities(states.hidden)[0]
    with engine(tmp_path / form, dtype="bfloat16") as llm:
        parameters = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
        served = llm.generate([{"prompt_token_ids": ids[0].tolist()}], parameters)[0].prompt_logprobs
    assert served is not None
    pairs = [(served[at][int(ids[0, at])].logprob, float(expected[at - 1, ids[0, at]])) for at in range(1, 24)]
    ours, theirs = np.array(pairs).T
    assert np.abs(ours - theirs).max() < 0.05 * np.std(theirs), pairs


@pytest.mark.parametrize(
    ("change", "found"),
    [({"bits": 3}, "gptq of 3 bits"), ({"quant_method": "awq", "version": "gemv"}, "version gemv")],
)
def test_other_layouts_are_refused(source: Path, change: dict[str, Any], found: str) -> None:
    with pytest.raises(Exl3PackError, match=found):
        Int4Folder(source, FORMATS["gptq"] | change)


def test_parts_that_do_not_fit_are_refused(source: Path, tmp_path: Path) -> None:
    quantized(source, tmp_path / "gptq", "gptq")
    folder = Int4Folder(tmp_path / "gptq", FORMATS["gptq"] | {"bits": 8})
    name = next(name for name in folder.names() if "proj" in name)
    with pytest.raises(Exl3PackError, match="zero points"):
        folder.read(name)

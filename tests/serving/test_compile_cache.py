"""vLLM keeps compiled graphs between starts: what the graphs depend on must be part of the key."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs

from tests.serving.conftest import PACKS, Tensors, golden_logits
from tests.serving.engine import engine, logits_of
from vllm_exl3.pack import Pack
from vllm_exl3.serving import fingerprint as fingerprint_module
from vllm_exl3.serving.fingerprint import fingerprint

TIED = "llama_tied-1.0-3inst"
OTHER_BITS = "llama_tied-3.0-mul1"


def key_of(folder: Path) -> str:
    """The hash that vLLM files compiled graphs under."""
    options: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 64}
    return EngineArgs(model=str(folder), **options).create_engine_config().compute_hash()


def with_the_bits_of(name: str) -> Callable[[Tensors], None]:
    """Another quantization of the same model in place of this one, under the same config.json."""

    def change(tensors: Tensors) -> None:
        from safetensors.torch import load_file

        tensors.clear()
        tensors.update(load_file(PACKS / name / "model.safetensors"))

    return change


def undeclared(config: dict[str, Any]) -> None:
    config["quantization_config"] = {"quant_method": "exl3"}


def test_a_pack_that_was_exchanged_in_place_has_another_key(variant: Callable[..., Path]) -> None:
    before = variant(TIED, config=undeclared)
    after = variant(TIED, with_the_bits_of(OTHER_BITS), undeclared)
    keys = [key_of(before)]
    for _ in range(2):
        file = before / "model.safetensors"
        file.write_bytes((after / "model.safetensors").read_bytes())
        (before / "quantization_config.json").unlink(missing_ok=True)
        keys.append(key_of(before))
    assert keys[0] != keys[1] == keys[2]


def test_another_version_of_this_package_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = key_of(PACKS / TIED)
    monkeypatch.setattr(fingerprint_module, "__version__", "99.0")
    assert key_of(PACKS / TIED) != key


def test_the_fingerprint_is_that_of_names_types_and_shapes(variant: Callable[..., Path]) -> None:
    def negate(tensors: Tensors) -> None:
        tensors["lm_head.suh"].neg_()

    assert fingerprint(Pack.open(variant(TIED, negate))) == fingerprint(Pack.open(PACKS / TIED))
    assert fingerprint(Pack.open(PACKS / OTHER_BITS)) != fingerprint(Pack.open(PACKS / TIED))


@pytest.mark.slow
def test_a_second_start_with_other_tensors_is_right(
    variant: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Inductor, and a cache that the first start fills."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "0")
    folder = variant(TIED, config=undeclared)
    other = variant(TIED, with_the_bits_of(OTHER_BITS), undeclared)
    ids, _ = golden_logits(TIED)
    with engine(other) as llm:
        expected = logits_of(llm, ids)
    with engine(folder, enforce_eager=False) as llm:
        assert relative(logits_of(llm, ids), expected) > 1e-2
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    (folder / "quantization_config.json").unlink(missing_ok=True)
    with engine(folder, enforce_eager=False) as llm:
        assert relative(logits_of(llm, ids), expected) < 1e-4


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.linalg.norm(found.double() - expected.double()) / torch.linalg.norm(expected.double()))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["native", "reference"])
def test_a_second_start_with_other_kernels_is_right(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen behind the ops: no option changes a graph."""
    monkeypatch.setattr("vllm_exl3.ops.backends._choices", {})
    monkeypatch.setenv("VLLM_EXL3_LINEAR_KERNEL", kernel)
    ids, _ = golden_logits(TIED)
    with engine(PACKS / TIED, enforce_eager=False) as llm:
        compiled = logits_of(llm, ids)
    monkeypatch.setattr("vllm_exl3.ops.backends._choices", {})
    monkeypatch.setenv("VLLM_EXL3_LINEAR_KERNEL", "reference")
    with engine(PACKS / TIED) as llm:
        assert relative(compiled, logits_of(llm, ids)) < 1e-3

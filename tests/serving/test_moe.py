"""MoE packs made by exllamav3, served by stock vLLM: logits, names, reload, the report."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.serving.conftest import MOE, PACKS, Tensors, golden_logits, relative_error
from tests.serving.engine import (
    PROMPTS,
    assert_reload_restores,
    engine,
    generate,
    logits_of,
    model_of,
)
from tests.serving.test_golden import BOUND, expected_backend
from vllm_exl3 import runtime_diagnostics
from vllm_exl3.ops import backends
from vllm_exl3.pack.errors import Exl3PackError

MIXTRAL, QWEN = MOE


def check_logits(name: str, ours: torch.Tensor, bound: float = BOUND) -> None:
    """Compare with exllamav3; Qwen's position 40 is a routing near tie that fp16 and fp32 decide differently."""
    logits = golden_logits(name)[1]
    if name == QWEN:
        assert relative_error(ours[:40], logits[:40]) <= bound
        assert relative_error(ours[41:], logits[41:]) <= 5 * bound
    else:
        assert relative_error(ours, logits) <= bound


@pytest.mark.parametrize("name", MOE)
def test_logits_are_exllamav3s(name: str) -> None:
    backends.reset_calls()
    with engine(PACKS / name) as llm:
        check_logits(name, logits_of(llm, golden_logits(name)[0]))
    served = {(op, backend) for op, backend, _ in backends.calls()}
    assert served == {("linear", expected_backend()), ("moe", expected_backend())}
    model = runtime_diagnostics()["models"][-1]
    bits = re.search(r"-(\d)\.0-", name)[1]
    assert model["experts"] == {
        "layers": 2,
        "total": 4 if name == MIXTRAL else 8,
        "local": 4 if name == MIXTRAL else 8,
        "weights_by_bits": {bits: 1.0},
    }
    assert model["kernels"]["moe"]["backend"] == expected_backend()


def test_the_reference_serves_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXL3_MOE_KERNEL", "reference")
    monkeypatch.setattr(backends, "_choices", {})
    backends.reset_calls()
    with engine(PACKS / QWEN) as llm:
        check_logits(QWEN, logits_of(llm, golden_logits(QWEN)[0]))
    assert ("moe", "reference", "RoutedExperts") in backends.calls()


def test_compiled_and_eager_engines_agree() -> None:
    with engine(PACKS / QWEN) as llm:
        eager = generate(llm, PROMPTS)
    with engine(PACKS / QWEN, enforce_eager=False) as llm:
        assert generate(llm, PROMPTS) == eager


def test_reloading_the_weights_gives_the_same_logits() -> None:
    ids, _ = golden_logits(MIXTRAL)
    with engine(PACKS / MIXTRAL) as llm:
        experts = model_of(llm).get_submodule("model.layers.0.block_sparse_moe.experts.routed_experts")
        assert_reload_restores(llm, ids, experts)


def with_long_names(tensors: Tensors) -> None:
    """Mixtral's w1, w2, w3 under the names that other families use."""
    for old, new in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        for name in [name for name in tensors if f".{old}." in name]:
            tensors[name.replace(f".{old}.", f".{new}.")] = tensors.pop(name)


def test_projections_may_be_named_otherwise_than_the_model_class_says(variant: Callable[..., Path]) -> None:
    with engine(variant(MIXTRAL, with_long_names)) as llm:
        check_logits(MIXTRAL, logits_of(llm, golden_logits(MIXTRAL)[0]))


def swap_two_experts(tensors: Tensors) -> None:
    first, second = ("model.layers.1.mlp.experts.0.", "model.layers.1.mlp.experts.3.")
    for name in [name for name in tensors if name.startswith(first)]:
        other = name.replace(first, second)
        tensors[name], tensors[other] = tensors[other], tensors[name]


def test_the_bound_catches_swapped_experts(variant: Callable[..., Path]) -> None:
    ids, logits = golden_logits(QWEN)
    with engine(variant(QWEN, swap_two_experts)) as llm:
        assert relative_error(logits_of(llm, ids)[:40], logits[:40]) > 10 * BOUND


def drop_an_expert(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.1.mlp.experts.6.")]:
        del tensors[name]


def test_a_missing_expert_is_named_before_loading(variant: Callable[..., Path]) -> None:
    message = r"model\.layers\.1\.mlp\.experts .*found experts 6 incomplete; expected 8 experts"
    with pytest.raises(Exl3PackError, match=message), engine(variant(QWEN, drop_an_expert)):
        pass


def test_dummy_weights_need_no_loader() -> None:
    with engine(PACKS / QWEN, load_format="dummy") as llm:
        assert len(generate(llm, [[1, 2, 3]], 4)[0]) == 4

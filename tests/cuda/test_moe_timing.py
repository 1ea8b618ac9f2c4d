"""The layers that ``vllm-exl3 bench moe`` times: the op takes them, and the limit beside follows from them."""

from collections.abc import Callable

import pytest
import torch

from vllm_exl3.cuda import moe_timing
from vllm_exl3.cuda.moe_timing import ExpertShape, random_experts, random_routing
from vllm_exl3.ops.moe import moe_reference
from vllm_exl3.pack.stored import Codebook

SHAPE = ExpertShape(experts=5, top_k=2, hidden=200, intermediate=256)
KINDS = [(3.0, int(Codebook.MUL1)), (4.0, int(Codebook.MCG))]


def test_a_timed_call_is_a_layer_of_its_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_experts(SHAPE, KINDS, "cpu")
    assert set(zip(layer.kinds[1::3], layer.kinds[2::3], strict=True)) == {(6, Codebook.MUL1), (8, Codebook.MCG)}
    assert layer.nbytes == sum(part.nbytes for part in layer.weights if part is not None and part.dtype == torch.int16)
    outputs: list[torch.Tensor] = []

    def replayed(call: Callable[[int], torch.Tensor], copies: int) -> float:
        outputs.extend(call(index).float() for index in range(copies))
        return 1.0

    monkeypatch.setattr(moe_timing, "replayed", replayed)
    monkeypatch.setattr(moe_timing.moe, "moe", moe_reference)
    assert layer.us(128) == 1.0
    assert len(outputs) == 2 and all(found.isfinite().all() and found.norm() > 0 for found in outputs)
    assert not torch.equal(*outputs)  # the routing is another


def test_routings_visit_different_experts_and_share_one() -> None:
    weights, ids = random_routing(50, SHAPE.experts, SHAPE.top_k, 3, "cpu")
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(50))
    assert all(len(set(row)) == SHAPE.top_k for row in ids.tolist())
    assert sorted(ids.unique().tolist()) == list(range(SHAPE.experts))


def test_the_limit_grows_with_the_experts_that_are_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_experts(SHAPE, KINDS, "cpu")
    monkeypatch.setattr(moe_timing, "issued_weights", lambda: 1e30)
    monkeypatch.setattr(moe_timing, "copy_bandwidth", lambda: 1e6 * layer.nbytes)
    assert layer.limit_us(1) == pytest.approx(2 / 5)
    assert layer.limit_us(2) == pytest.approx(2 / 5 + 3 / 5 * 2 / 5)
    assert layer.limit_us(10**6) == pytest.approx(1)
    monkeypatch.setattr(moe_timing, "issued_weights", lambda: 1e6 * 3 * 5 * 200 * 256 / 7)
    assert layer.limit_us(10**6) == pytest.approx(7)

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


def test_the_limit_is_of_the_experts_that_are_visited_and_of_all_products(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_experts(SHAPE, KINDS, "cpu")
    asked: dict[int, tuple[float, ...]] = {}
    monkeypatch.setattr(moe_timing, "bound_us", lambda *work: asked.setdefault(tokens, work) and 7.0)
    for tokens in (1, 2, 10**6):
        assert layer.limit_us(tokens) == 7.0
    weights = 3 * 200 * 256
    for tokens, share in ((1, 2 / 5), (2, 2 / 5 + 3 / 5 * 2 / 5), (10**6, 1)):
        nbytes, decoded, operations = asked[tokens]
        assert nbytes == pytest.approx(share * layer.nbytes) and decoded == pytest.approx(share * 5 * weights)
        assert operations == 2 * tokens * 2 * weights

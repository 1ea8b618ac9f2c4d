"""Long prefill by stretches, with FlashAttention's mathematics in plain PyTorch."""

import dataclasses

import pytest
import torch

from tests.attention.cases import DEVICE, DTYPE, UNPACKED_TOLERANCE, Case, build, error
from vllm_exl3.attention.prefill import PrefillPlan, attend_long, plan_prefill


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    causal: bool,
    soft_cap: float,
) -> torch.Tensor:
    """What FlashAttention computes for one request: the mask is aligned to the last query and key."""
    tokens, heads, _ = query.shape
    length = key.shape[0]
    assert query_starts.tolist() == [0, tokens] and key_starts.tolist() == [0, length]
    assert not causal or tokens <= length
    group = heads // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if causal:
        seen = torch.ones(tokens, length, device=query.device).tril(length - tokens).bool()
        scores = scores.masked_fill(~seen, -torch.inf)
    output.copy_(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))
    return scores.logsumexp(-1).float()


@pytest.mark.parametrize(
    ("case", "apart"),
    [
        (Case((70, 130), (20, 67), 4, 2, 64, 16), True),
        (Case((96, 48), (1, 48), 3, 1, 96, 48, soft_cap=3.0, sinks=True, heads_inside=True), False),
    ],
)
def test_attend_long(case: Case, apart: bool) -> None:
    problem, expected = build(case, DEVICE, DTYPE)
    plan = PrefillPlan(48, 40, case.heads, case.kv_heads, case.head_size, apart)
    scratch = [torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for shape, dtype in plan.shapes]
    first = case.counts[0]
    requests = [(0, 0, first, case.lengths[0]), (1, first, sum(case.counts), case.lengths[1])]
    attend_long(problem, requests, plan, scratch, flash_attention)
    # Unpacked values are rounded to bfloat16 too.
    assert error(problem.output, expected) <= UNPACKED_TOLERANCE


GROUPED = [(heads, kv_heads) for kv_heads in (1, 4, 8, 32) for heads in (1, 8, 24, 32, 64, 128) if not heads % kv_heads]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPED)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_the_scratch_is_bounded(heads: int, kv_heads: int, size: int, apart: bool) -> None:
    plan = plan_prefill(heads, kv_heads, size, 132, apart)
    assert plan.nbytes <= 128 << 20
    assert plan.part % 128 == 0 and 0 < plan.part <= plan.stretch <= 16384


def test_parts_fill_an_h200() -> None:
    plan = plan_prefill(24, 4, 256, 132)
    assert plan == dataclasses.replace(plan, stretch=16384, part=1408)  # 24 · 11 tiles: two rounds of 132

"""Long prefill on FlashAttention: unpack the cache a stretch at a time, attend, add the stretches up.

A stretch is 16,384 tokens (fewer where a KV head row is wide), unpacked to 16 bits into scratch that all layers share.
Query tokens go through in parts, so that the scratch, float32 sums included, does not grow with the chunk.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_exl3.attention.accumulate import accumulate_stretch
from vllm_exl3.attention.launch import Problem
from vllm_exl3.attention.layout import rotation_block
from vllm_exl3.attention.rotation import rotate_rows
from vllm_exl3.attention.unpack import unpack_tokens

__all__ = ["FlashAttention", "PrefillPlan", "attend_long", "plan_prefill"]

_SCRATCH = 120 << 20
_STRETCH = 16384
_ROW_TILE = 128
"""Rows of a FlashAttention tile."""

FlashAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, bool, float],
    torch.Tensor,
]
"""(query, key, value, query starts, key starts, output, scale, causal, soft cap) to log-sum-exp ``[heads, tokens]``."""


@dataclass(frozen=True)
class PrefillPlan:
    """Sizes of the scratch for one layer shape.

    Attributes:
        stretch: cached tokens unpacked at once.
        part: query tokens that go through at once.
        heads: query heads.
        kv_heads: KV heads.
        head_size: D.
        rotated_apart: whether rotated queries need scratch, rather than the place of the output.
    """

    stretch: int
    part: int
    heads: int
    kv_heads: int
    head_size: int
    rotated_apart: bool

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Keys, values, FlashAttention's output, sums, their log-sum-exps, and rotated queries."""
        rows = (self.part, self.heads, self.head_size)
        unpacked = (self.stretch, self.kv_heads, self.head_size)
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
            (unpacked, torch.bfloat16),
            (unpacked, torch.bfloat16),
            (rows, torch.bfloat16),
            (rows, torch.float32),
            (rows[:2], torch.float32),
        ]
        return [*shapes, (rows, torch.bfloat16)] if self.rotated_apart else shapes

    @property
    def nbytes(self) -> int:
        """Bytes of scratch."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.shapes)


@functools.cache
def plan_prefill(
    heads: int, kv_heads: int, head_size: int, multiprocessors: int, rotated_apart: bool = False
) -> PrefillPlan:
    """Sizes that stay inside the scratch: the longest stretch first, at most half of it, then query rows.

    FlashAttention runs tiles of 128 rows of one head, one a multiprocessor: 1024 tokens of 24 heads are 192 tiles,
    which 132 multiprocessors take two rounds for, as they would for 264. So of the numbers of query tokens that fit,
    one that fills its last round is taken.
    """
    stretch = _STRETCH
    while stretch > 1024 and stretch * kv_heads * head_size * 4 > _SCRATCH * 5 // 8:
        stretch //= 2
    row_bytes = heads * (head_size * (8 if rotated_apart else 6) + 4)
    most = min(stretch, (_SCRATCH - stretch * kv_heads * head_size * 4) // row_bytes) // _ROW_TILE
    best = max(range(1, max(1, most) + 1), key=lambda tiles: (round(_filled(tiles * heads, multiprocessors), 2), tiles))
    return PrefillPlan(stretch, best * _ROW_TILE, heads, kv_heads, head_size, rotated_apart)


def _filled(tiles: int, multiprocessors: int) -> float:
    return tiles / (-(-tiles // multiprocessors) * multiprocessors)


def attend_long(
    problem: Problem,
    requests: list[tuple[int, int, int, int]],
    plan: PrefillPlan,
    scratch: list[torch.Tensor],
    flash_attention: FlashAttention,
) -> None:
    """Attend requests of many query tokens over a long context.

    Args:
        problem: the layer; no window.
        requests: (row of the page table, first and last + 1 query token, tokens in the cache) of each.
        plan: of the layer's shape.
        scratch: tensors of ``plan.shapes``.
        flash_attention: see `FlashAttention`.
    """
    for row, first, last, length in requests:
        for begin in range(first, last, plan.part):
            end = min(begin + plan.part, last)
            _attend_part(problem, problem.table[row], begin, end, length - (last - end), plan, scratch, flash_attention)


def _attend_part(
    problem: Problem,
    pages: torch.Tensor,
    begin: int,
    end: int,
    visible: int,
    plan: PrefillPlan,
    scratch: list[torch.Tensor],
    flash_attention: FlashAttention,
) -> None:
    """Query tokens ``begin`` to ``end``, the last of which sees ``visible`` tokens."""
    keys, values, parts, sums, lses = scratch[:5]
    count = end - begin
    output = problem.output[begin:end]
    # The output's place is free until the last stretch.
    query = scratch[5][:count] if plan.rotated_apart else output
    rotate_rows(problem.query[begin:end], query)
    query_starts = _starts(count, query.device)
    # From the end: all of these query tokens are inside the stretch that is masked.
    stops = list(range(visible, 0, -plan.stretch))
    for index, stop in enumerate(stops):
        start = max(0, stop - plan.stretch)
        key, value = keys[: stop - start], values[: stop - start]
        unpack_tokens(problem.cache, pages, start, key, value)
        lse = flash_attention(
            query,
            key,
            value,
            query_starts,
            _starts(stop - start, query.device),
            parts[:count],
            problem.scale / rotation_block(query.shape[2]),
            index == 0,
            problem.soft_cap,
        )
        accumulate_stretch(
            parts[:count], lse, sums[:count], lses[:count], output, problem.sinks, index == 0, index == len(stops) - 1
        )


def _starts(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, count + 1, count, dtype=torch.int32, device=device)

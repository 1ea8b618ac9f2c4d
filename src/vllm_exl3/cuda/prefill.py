"""The linear op for many tokens: kernels rotate the input, multiply by decoded weights, and reduce split tiles."""

import functools

import torch

from vllm_exl3 import env
from vllm_exl3.cuda import dispatch, runtime
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.geometry import BLOCK_K, GpuLimits, round_up
from vllm_exl3.cuda.launch import Step, launch_kernels
from vllm_exl3.cuda.prefill_input import input_instances
from vllm_exl3.cuda.prefill_plan import (
    FINISH,
    INT8_FINISH,
    MMA_TILES,
    TILES,
    plan_prefill,
)
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import BLOCK

__all__ = ["instances", "prefill", "serves", "steps", "window_rows"]

_LARGE_K_BLOCKS = 80
"""K blocks of 64 inputs × 256 outputs a multiprocessor from which on a layer is large."""

_FILLED, _LEAST_PART = 0.9, 8
"""The share of multiprocessors that an even split of a layer's k must keep busy, and the fewest k blocks of a split,
for the prefill kernel to serve few tokens of it."""

_WINDOW_BYTES, _WINDOW_STEP = 64 << 20, 256
"""Transformed activations of one launch stay near the first; more rows are served in windows of a multiple of the
second."""


@functools.lru_cache(maxsize=4096)
def _first_rows(shards: tuple[Shard, ...], limits: GpuLimits) -> int | None:
    """From how many tokens on the prefill kernel serves a layer; None: never."""
    if len({shard.in_features for shard in shards}) != 1:
        return None
    n_tiles = sum(-(-shard.out_features // (2 * BLOCK)) for shard in shards)
    depth, multiprocessors = shards[0].in_features // BLOCK_K, limits.multiprocessors
    fills = n_tiles * depth >= _LARGE_K_BLOCKS * multiprocessors or _splits_evenly(n_tiles, depth, multiprocessors)
    return dispatch.prefill_from(limits.architecture, fills=fills)


def _splits_evenly(n_tiles: int, depth: int, multiprocessors: int) -> bool:
    """True where equal parts of k, none of them short, give nearly every multiprocessor one part of a tile."""
    parts = multiprocessors // n_tiles
    even = parts >= 2 and depth % parts == 0 and depth >= _LEAST_PART * parts
    return even and n_tiles * parts >= _FILLED * multiprocessors


def serves(shards: tuple[Shard, ...], rows: int, limits: GpuLimits) -> bool:
    """True where the prefill kernel is the one for ``rows`` tokens of a fused linear."""
    first = _first_rows(shards, limits)
    return first is not None and rows >= first and not env.batch_invariant()


def instances(shards: tuple[Shard, ...], limits: GpuLimits) -> list[Instance]:
    """The kernels that `prefill` uses for a fused linear, for any number of tokens."""
    if env.batch_invariant() or _first_rows(shards, limits) is None:
        return []
    tiles = TILES if limits.warpgroups else MMA_TILES
    plans = [plan_prefill(shards, tokens, shards[0].in_features, limits, tokens) for tokens in tiles]
    return [*input_instances(limits), FINISH, *(plan.instance for plan in plans)]


@functools.lru_cache(maxsize=4096)
def window_rows(shards: tuple[Shard, ...], rows: int, *, int8: bool = False) -> int:
    """How many of ``rows`` rows one launch takes: as few launches as scratch allows, of even size.

    ``int8``: with activations of one byte instead of two.
    """
    row_bytes = (1 if int8 else 2) * sum(shard.in_features for shard in shards)
    most = _WINDOW_BYTES // row_bytes // _WINDOW_STEP * _WINDOW_STEP
    launches = max(1, -(-rows // max(_WINDOW_STEP, most)))
    return round_up(-(-rows // launches), _WINDOW_STEP)


def prefill(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: tuple[Shard, ...],
    out: torch.Tensor,
    *,
    tokens: int | None = None,
    ranges: int | None = None,
    limits: GpuLimits | None = None,
    int8: bool = False,
) -> None:
    """``out = ((x·suh) H W H)·svh + bias`` for shards of one input width.

    Args:
        x: ``[M, in]`` float16, bfloat16 or float32, the last dimension contiguous.
        trellis: int16, all shards flat; 16-byte aligned.
        suh: float16, all shards flat.
        svh: float16, all shards flat.
        bias: ``[sum of crop sizes]`` or None.
        shards: at most `geometry.MAX_SHARDS`.
        out: ``[M, sum of crop sizes]``, rows may be strided.
        tokens: tokens of a tile; chosen by cost when None.
        ranges: how finely what does not fill the GPU is split; chosen by cost when None.
        limits: of the GPU, where they should be others than the device's own.
        int8: round weights and rotated inputs, of shards that `prefill_int8.refusal` does not refuse.
    """
    device = runtime.device(x.device.index)
    for step in steps(shards, x.shape[0], x.shape[1], limits or device.limits, tokens, ranges, int8=int8):
        rows = step.rows or slice(None)
        launch_kernels(device, step.plan, x[rows], trellis, suh, svh, bias, out[rows], step.finish)


def steps(
    shards: tuple[Shard, ...],
    rows: int,
    in_width: int,
    limits: GpuLimits,
    tokens: int | None = None,
    ranges: int | None = None,
    *,
    int8: bool = False,
) -> tuple[Step, ...]:
    """The launches that serve ``rows`` tokens; arguments as `prefill` has them."""
    window = window_rows(shards, rows, int8=int8)
    finish = INT8_FINISH if int8 else FINISH
    return tuple(
        Step(
            None if window >= rows else slice(first, first + window),
            plan_prefill(shards, min(window, rows - first), in_width, limits, tokens, ranges, int8=int8),
            finish,
        )
        for first in range(0, rows, window)
    )

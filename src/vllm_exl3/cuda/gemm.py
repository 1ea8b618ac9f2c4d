"""The linear op for up to 128 tokens on Hopper: one kernel rotates the input, one multiplies it by decoded weights."""

import functools

import torch

from vllm_exl3 import env
from vllm_exl3.cuda import dispatch, prefill_int8, runtime
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.gemm_plan import (
    GEMM_TILES,
    INT8_GEMM_TILES,
    MOST_OF_TWO_KINDS,
    GemmPartition,
    k_blocks,
    plan_gemm,
    refusal,
)
from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.cuda.launch import launch_kernels
from vllm_exl3.ops.shards import Shard

__all__ = ["choose", "gemm", "instances", "served_rows"]


@functools.lru_cache(maxsize=4096)
def served_rows(shards: tuple[Shard, ...], limits: GpuLimits, *, int8: bool) -> range:
    """The numbers of tokens of a fused linear that this kernel is the one for, if the arithmetic is wanted."""
    if refusal(shards, limits, int8=int8) is not None:
        return range(0)
    kinds = {(shard.half_bits, shard.codebook) for shard in shards}
    rows = dispatch.gemm_rows(limits.architecture, kinds, k_blocks(shards) / limits.multiprocessors, int8=int8)
    return rows if len(kinds) == 1 else range(rows.start, min(rows.stop, MOST_OF_TWO_KINDS + 1))


def choose(shards: tuple[Shard, ...], rows: int, limits: GpuLimits) -> bool | None:
    """True where this kernel serves ``rows`` tokens with int8, False where with fp16; None where others serve them."""
    if env.batch_invariant():
        return None
    if prefill_int8.fast(shards):
        if rows in served_rows(shards, limits, int8=True):
            return True
        if rows <= dispatch.FAST_TOKENS:
            return None
    return False if rows in served_rows(shards, limits, int8=False) else None


def instances(shards: tuple[Shard, ...], limits: GpuLimits) -> list[Instance]:
    """The kernels that `gemm` uses for a fused linear, for any number of tokens that it serves."""
    found: dict[Instance, None] = {}
    for rows in range(1, max(*GEMM_TILES, *INT8_GEMM_TILES) + 1):
        if (int8 := choose(shards, rows, limits)) is not None:
            plan = plan_gemm(shards, rows, shards[0].in_features, limits, int8=int8)
            found |= dict.fromkeys((plan.transform.instance, plan.instance))
    return list(found)


def gemm(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: tuple[Shard, ...],
    out: torch.Tensor,
    *,
    partition: GemmPartition | None = None,
    int8: bool = False,
) -> None:
    """``out = ((x·suh) H W H)·svh + bias`` for shards of one input width and at most 128 tokens.

    Args:
        x: ``[M, in]`` float16, bfloat16 or float32, the last dimension contiguous.
        trellis: int16, all shards flat; 16-byte aligned.
        suh: float16, all shards flat.
        svh: float16, all shards flat.
        bias: ``[sum of crop sizes]`` or None.
        shards: at most `geometry.MAX_SHARDS`, which `gemm_plan.refusal` does not refuse.
        out: ``[M, sum of crop sizes]``, rows may be strided.
        partition: how to divide the work; chosen by modelled time when None.
        int8: round weights and rotated inputs to int8, as `vllm_exl3.ops.int8` does.

    Raises:
        ValueError: the shards cannot be served so.
    """
    device = runtime.device(x.device.index)
    plan = plan_gemm(shards, x.shape[0], x.shape[1], device.limits, partition, int8=int8)
    launch_kernels(device, plan, x, trellis, suh, svh, bias, out)

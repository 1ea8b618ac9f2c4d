"""The linear op for up to 64 tokens on Hopper: one kernel rotates the input, one multiplies it by decoded weights."""

import functools

import torch

from vllm_exl3 import env
from vllm_exl3.cuda import dispatch, prefill, runtime
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.gemm_plan import GEMM_TILES, GemmCut, gemm_instance, plan_gemm, refusal, units
from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.ops.shards import Shard

__all__ = ["MOST_ROWS", "gemm", "instances", "serves"]

MOST_ROWS = max(GEMM_TILES)


@functools.lru_cache(maxsize=4096)
def _first_rows(shards: tuple[Shard, ...], limits: GpuLimits) -> int | None:
    """From how many tokens on the kernel serves a layer; None: never."""
    if refusal(shards, limits) is not None:
        return None
    kinds = {(shard.half_bits, shard.codebook) for shard in shards}
    return dispatch.gemm_from(limits.architecture, kinds, units(shards) / limits.multiprocessors)


def serves(shards: tuple[Shard, ...], rows: int, limits: GpuLimits) -> bool:
    """Whether this kernel is the one for ``rows`` tokens of a fused linear."""
    first = _first_rows(shards, limits)
    return first is not None and first <= rows <= MOST_ROWS and not env.batch_invariant()


def instances(shards: tuple[Shard, ...], limits: GpuLimits) -> list[Instance]:
    """The kernels that `gemm` uses for a fused linear, for any number of tokens that it serves."""
    first = None if env.batch_invariant() else _first_rows(shards, limits)
    if first is None:
        return []
    kinds = sorted({(shard.half_bits, shard.codebook) for shard in shards})
    rows = [tile for tile in GEMM_TILES if tile >= first]
    plans = [plan_gemm(shards, tile, shards[0].in_features, limits) for tile in rows]
    rotations = [plan.transform.instance for plan in plans]
    return [*dict.fromkeys(rotations), *(gemm_instance(tile, kinds) for tile in rows)]


def gemm(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: tuple[Shard, ...],
    out: torch.Tensor,
    *,
    cut: GemmCut | None = None,
) -> None:
    """``out = ((x·suh) H W H)·svh + bias`` for shards of one input width and at most `MOST_ROWS` tokens.

    Args:
        x: ``[M, in]`` float16, bfloat16 or float32, the last dimension contiguous.
        trellis: int16, all shards flat; 16-byte aligned.
        suh: float16, all shards flat.
        svh: float16, all shards flat.
        bias: ``[sum of crop sizes]`` or None.
        shards: at most `geometry.MAX_SHARDS`, which `gemm_plan.refusal` does not refuse.
        out: ``[M, sum of crop sizes]``, rows may be strided.
        cut: how to divide the work; chosen by modelled time when None.

    Raises:
        ValueError: the shards cannot be served so.
    """
    device = runtime.device(x.device.index)
    plan = plan_gemm(shards, x.shape[0], x.shape[1], device.limits, cut)
    prefill.launch(device, plan, x, trellis, suh, svh, bias, out)

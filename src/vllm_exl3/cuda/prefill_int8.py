"""The fast mode of the linear op for many tokens: int8 products of mul1 weights, asked for by VLLM_EXL3_PRECISION.

Two launches, or three: one rotates the input and rounds it to int8, one decodes, multiplies and stores tiles, and where
several clusters have parts of a tile a last one adds them up.
`vllm_exl3.ops.int8` is the same arithmetic in plain PyTorch; docs/fast-mode.md says what it costs.
"""

import torch

from vllm_exl3 import env
from vllm_exl3.cuda import runtime
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.cuda.prefill import prefill
from vllm_exl3.cuda.prefill_input import MOST_INT8_IN, QUANTIZE
from vllm_exl3.cuda.prefill_plan import INT8_FINISH, INT8_TILES, GemmPlan, plan_prefill
from vllm_exl3.ops.int8 import MOST_HALF_BITS
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import Codebook

__all__ = ["LEAST_ROWS", "fast", "instances", "plan", "prefill_int8", "refusal", "serves", "weights_refusal"]

LEAST_ROWS = 129
"""Tokens from which on the kernel serves. Fewer leave the tensor cores waiting for weights to be decoded: at 128 the
default mode, which has a kernel for so many, is as fast on an H200 (benchmarks/results/h200/prefill-fast.json)."""


def weights_refusal(shards: tuple[Shard, ...]) -> str | None:
    """Why no kernel of fast mode, for few tokens or many, serves these weights, or None."""
    if env.batch_invariant():
        return "VLLM_BATCH_INVARIANT leaves one arithmetic for every number of tokens"
    if any(shard.codebook != Codebook.MUL1 for shard in shards):
        return "only mul1 weights are affine in an integer"
    if any(shard.half_bits > MOST_HALF_BITS for shard in shards):
        return f"int8 is too coarse for more than {MOST_HALF_BITS // 2} bits"
    return None


def fast(shards: tuple[Shard, ...]) -> bool:
    """True where VLLM_EXL3_PRECISION wants fast mode and some kernel of it serves these weights."""
    return env.PRECISION.get() == "fast" and weights_refusal(shards) is None


def refusal(shards: tuple[Shard, ...], limits: GpuLimits) -> str | None:
    """Why a fused linear is served by the default arithmetic even in fast mode, or None."""
    if not limits.warpgroups:
        return f"there is no int8 kernel for {limits.architecture}"
    if (reason := weights_refusal(shards)) is not None:
        return reason
    widths = {shard.in_features for shard in shards}
    if len(widths) != 1 or max(widths) > MOST_INT8_IN:
        return f"shards need one input width of at most {MOST_INT8_IN}"
    return None


def serves(shards: tuple[Shard, ...], rows: int, limits: GpuLimits) -> bool:
    """True where int8 products are wanted for ``rows`` tokens of a fused linear, and served."""
    return rows >= LEAST_ROWS and env.PRECISION.get() == "fast" and refusal(shards, limits) is None


def plan(
    shards: tuple[Shard, ...],
    rows: int,
    in_width: int,
    limits: GpuLimits,
    tokens: int | None = None,
    ranges: int | None = None,
) -> GemmPlan:
    """The launch that serves ``rows`` tokens; arguments as `plan_prefill` takes them."""
    return plan_prefill(shards, rows, in_width, limits, tokens, ranges, int8=True)


def instances(shards: tuple[Shard, ...], limits: GpuLimits) -> list[Instance]:
    """The kernels that `prefill_int8` uses for a fused linear, for any number of tokens; none in default mode."""
    if env.PRECISION.get() != "fast" or refusal(shards, limits) is not None:
        return []
    width = shards[0].in_features
    return [QUANTIZE, INT8_FINISH, *(plan(shards, tokens, width, limits, tokens).instance for tokens in INT8_TILES)]


def prefill_int8(
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
) -> None:
    """``out = ((x·suh) H W H)·svh + bias`` with weights and rotated inputs rounded to int8.

    Args:
        x: ``[M, in]`` float16, bfloat16 or float32, the last dimension contiguous.
        trellis: int16, all shards flat; 16-byte aligned.
        suh: float16, all shards flat.
        svh: float16, all shards flat.
        bias: ``[sum of crop sizes]`` or None.
        shards: at most `geometry.MAX_SHARDS`, which `refusal` does not refuse.
        out: ``[M, sum of crop sizes]``, rows may be strided.
        tokens: tokens of a tile; chosen by cost when None.
        ranges: how finely what does not fill the GPU is split; chosen by cost when None.

    Raises:
        ValueError: the shards cannot be served so.
    """
    device = runtime.device(x.device.index)
    if (reason := refusal(shards, device.limits)) is not None:
        raise ValueError(f"int8 products were asked for, but {reason}")
    prefill(x, trellis, suh, svh, bias, shards, out, tokens=tokens, ranges=ranges, int8=True)

"""The fast mode of the linear op for many tokens: int8 products of mul1 weights, asked for by VLLM_EXL3_PRECISION.

Two launches: one rotates the input and rounds it to int8, the other decodes, multiplies and finishes.
`vllm_exl3.ops.int8` is the same arithmetic in plain PyTorch; docs/fast-mode.md says what it costs.
"""

import functools
from dataclasses import dataclass

import torch

from vllm_exl3 import env
from vllm_exl3.cuda import dispatch, runtime
from vllm_exl3.cuda.binding import bind
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.geometry import UNIT_IN, GpuLimits, round_up
from vllm_exl3.cuda.prefill import launch_products
from vllm_exl3.cuda.prefill_plan import FINISH, INT8_TILES, PrefillArgs, PrefillPlan, plan_prefill
from vllm_exl3.ops.int8 import MOST_HALF_BITS
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import Codebook

__all__ = ["LEAST_ROWS", "QUANTIZE", "cut_quantize", "instances", "prefill_int8", "refusal", "serves", "window_rows"]

QUANTIZE = Instance("prefill_quantize.cu", "exl3_prefill_quantize")
"""The kernel that rotates inputs and rounds them, for every tile."""

LEAST_ROWS = 128
"""Tokens from which on the kernel serves; fewer leave the tensor cores waiting for weights to be decoded."""

_MOST_THREADS, _MOST_ROWS, _PART = 1024, 4, 32
"""Of a block of prefill_quantize.cu: threads and rows at most, and the channels of a row that a thread has."""
_THREADS, _REGISTERS, _WARP = 256, 64, 32
"""Threads of such a block where rows are short enough to choose, and registers of a thread."""
_MULTIPROCESSOR_REGISTERS, _BLOCK_RESERVE = 65536, 1024
_MOST_IN = _MOST_THREADS * _PART
_WINDOW_BYTES, _WINDOW_STEP = 64 << 20, 256
"""Activations of one launch stay near the first; more rows are served in windows of a multiple of the second."""


def refusal(shards: tuple[Shard, ...], limits: GpuLimits) -> str | None:
    """Why a fused linear is served by the default arithmetic even in fast mode, or None."""
    if not limits.warpgroups:
        return f"there is no int8 kernel for {limits.architecture}"
    if dispatch.batch_invariant():
        return "VLLM_BATCH_INVARIANT leaves one arithmetic for every number of tokens"
    if any(shard.codebook != Codebook.MUL1 for shard in shards):
        return "only mul1 weights are affine in an integer"
    if any(shard.half_bits > MOST_HALF_BITS for shard in shards):
        return f"int8 is too coarse for more than {MOST_HALF_BITS // 2} bits"
    widths = {shard.in_features for shard in shards}
    if len(widths) != 1 or max(widths) > _MOST_IN:
        return f"shards need one input width of at most {_MOST_IN}"
    return None


def serves(shards: tuple[Shard, ...], rows: int, limits: GpuLimits) -> bool:
    """Whether int8 products are wanted for ``rows`` tokens of a fused linear, and served."""
    return rows >= LEAST_ROWS and env.PRECISION.get() == "fast" and refusal(shards, limits) is None


def plan(
    shards: tuple[Shard, ...],
    rows: int,
    in_width: int,
    limits: GpuLimits,
    tokens: int | None = None,
    ranges: int | None = None,
) -> PrefillPlan:
    """The launch that serves ``rows`` tokens; arguments as `plan_prefill` takes them."""
    return plan_prefill(shards, rows, in_width, limits, tokens, ranges, int8=True)


def instances(shards: tuple[Shard, ...], limits: GpuLimits) -> list[Instance]:
    """The kernels that `prefill_int8` uses for a fused linear, for any number of tokens; none in default mode."""
    if env.PRECISION.get() != "fast" or refusal(shards, limits) is not None:
        return []
    width = shards[0].in_features
    return [QUANTIZE, FINISH, *(plan(shards, tokens, width, limits, tokens).instance for tokens in INT8_TILES)]


def window_rows(shards: tuple[Shard, ...]) -> int:
    """How many rows one launch takes."""
    rows = _WINDOW_BYTES // sum(shard.in_features for shard in shards)
    return max(_WINDOW_STEP, rows // _WINDOW_STEP * _WINDOW_STEP)


@dataclass(frozen=True, slots=True)
class QuantizeCut:
    """The launch of ``exl3_prefill_quantize``.

    Attributes:
        block_rows: rows that a block has at once.
        grid: thread blocks, which take groups of rows in turn, and shards.
        threads: threads a block.
        shared: dynamic shared memory in bytes: two groups of rows.
    """

    block_rows: int
    grid: tuple[int, int]
    threads: int
    shared: int


def _held_pitch(in_features: int) -> int:
    """Bytes from row to row in shared memory, as in prefill_quantize.cu."""
    return in_features // UNIT_IN * (2 * UNIT_IN + 16) // 128 * 128 + 128 + 32


@functools.lru_cache(maxsize=4096)
def cut_quantize(rows: int, in_features: int, shards: int, limits: GpuLimits) -> QuantizeCut:
    """Divide ``rows`` rows of ``in_features`` channels, for each of ``shards``.

    More rows a block make longer runs of stores, 16 bytes a row.
    """
    block_rows = _MOST_ROWS
    while block_rows > 1 and block_rows * in_features // _PART > _THREADS:
        block_rows //= 2
    threads = round_up(block_rows * in_features // _PART, _WARP)
    shared = 2 * block_rows * _held_pitch(in_features)
    at_once = min(
        _MULTIPROCESSOR_REGISTERS // (_REGISTERS * threads), limits.shared_memory // (shared + _BLOCK_RESERVE)
    )
    blocks = max(1, limits.multiprocessors * max(1, at_once) // shards)
    return QuantizeCut(block_rows, (min(blocks, -(-rows // block_rows)), shards), threads, shared)


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
        ranges: how finely what does not fill the GPU is cut; chosen by cost when None.

    Raises:
        ValueError: the shards cannot be served so.
    """
    device = runtime.device(x.device.index)
    if (reason := refusal(shards, device.limits)) is not None:
        raise ValueError(f"int8 products were asked for, but {reason}")
    step = window_rows(shards)
    for first in range(0, x.shape[0], step):
        part = x[first : first + step]
        launch = plan(shards, part.shape[0], x.shape[1], device.limits, tokens, ranges)
        _launch(device, launch, part, trellis, suh, svh, bias, shards, out[first : first + step])


def _launch(
    device: runtime.Device,
    plan: PrefillPlan,
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: tuple[Shard, ...],
    out: torch.Tensor,
) -> None:
    stream = torch.cuda.current_stream(x.device).cuda_stream
    scratch = torch.empty(plan.scratch, dtype=torch.uint8, device=x.device)
    arguments = PrefillArgs.from_buffer_copy(plan.arguments)
    bind(arguments, plan.offsets, scratch, plan.scratch_parts, x, trellis, suh, svh, bias, out)
    inputs = cut_quantize(x.shape[0], shards[0].in_features, len(shards), device.limits)
    arguments.block_rows = inputs.block_rows
    quantize = device.kernel(QUANTIZE)
    quantize.allow_shared(2 * _held_pitch(_MOST_IN))
    quantize.launch(inputs.grid, inputs.threads, inputs.shared, stream, [arguments], device.limits.dependent_launch)
    launch_products(device, plan, arguments, stream)

"""Adding up attention over stretches of the context by their log-sum-exps, in float32."""

import torch
import triton
import triton.language as tl

from vllm_exl3.attention.layout import rotation_block
from vllm_exl3.attention.rotation import device_signs, unrotate_tile

__all__ = ["accumulate_stretch"]


@triton.jit
def _accumulate_kernel(
    part_ptr,
    part_lse_ptr,
    sum_ptr,
    lse_ptr,
    output_ptr,
    signs_ptr,
    sinks_ptr,
    tokens,
    heads,
    part_lse_stride,
    output_stride,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Grid: (block of rows); a row is one head of one token."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    ok = row < tokens * heads
    token = row // heads
    head = row % heads
    inside = ok[:, None] & (column < D)[None, :]
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    x = tl.load(part_ptr + at, mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(part_lse_ptr + head * part_lse_stride + token, mask=ok, other=0.0)
    if not FIRST:
        before = tl.load(lse_ptr + row, mask=ok, other=0.0)
        top = tl.maximum(before, lse)
        weight_before = tl.exp(before - top)
        weight = tl.exp(lse - top)
        both = weight_before + weight
        x = x * (weight / both)[:, None]
        x += tl.load(sum_ptr + at, mask=inside, other=0.0) * (weight_before / both)[:, None]
        lse = top + tl.log(both)
    if LAST:
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=ok, other=0.0).to(tl.float32)
            x = x * (1.0 / (1.0 + tl.exp(sink - lse)))[:, None]
        x = unrotate_tile(x, signs_ptr, PADDED, ROWS, BLOCK, LOG_BLOCK)
        out = token.to(tl.int64) * output_stride + head * D
        tl.store(output_ptr + out[:, None] + column[None, :], x.to(output_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(sum_ptr + at, x, mask=inside)
        tl.store(lse_ptr + row, lse, mask=ok)


def accumulate_stretch(
    part: torch.Tensor,
    part_lse: torch.Tensor,
    total: torch.Tensor,
    lse: torch.Tensor,
    output: torch.Tensor,
    sinks: torch.Tensor | None,
    first: bool,
    last: bool,
) -> None:
    """Add one stretch; after the last, rotate back and write the output.

    Args:
        part: ``[tokens, heads, D]`` contiguous: attention over the stretch, rotated.
        part_lse: float32 ``[heads, tokens]``: log-sum-exp of its scores.
        total: float32 ``[tokens, heads, D]``: the sum so far, replaced by the new one.
        lse: float32 ``[tokens, heads]``: its log-sum-exp.
        output: ``[tokens, heads, D]``, heads and last dimension contiguous.
        sinks: ``[heads]`` or None.
        first: nothing was added before.
        last: nothing follows.
    """
    tokens, heads, size = part.shape
    block = rotation_block(size)
    rows = 4
    _accumulate_kernel[(triton.cdiv(tokens * heads, rows),)](
        part,
        part_lse,
        total,
        lse,
        output,
        device_signs(block, part.device),
        sinks,
        tokens,
        heads,
        part_lse.stride(0),
        output.stride(0),
        D=size,
        PADDED=triton.next_power_of_2(size),
        BLOCK=block,
        LOG_BLOCK=block.bit_length() - 1,
        ROWS=rows,
        FIRST=first,
        LAST=last,
        SINKS=sinks is not None,
        num_warps=4,
    )

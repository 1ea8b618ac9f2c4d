"""The randomised Hadamard transform in Triton, for use inside kernels, and on rows of queries."""

import functools

import torch
import triton
import triton.language as tl

from vllm_exl3.attention.layout import rotation_block, rotation_signs

__all__ = ["device_signs", "hadamard_rows", "rotate_rows", "unrotate_tile"]


@functools.cache
def device_signs(block: int, device: torch.device) -> torch.Tensor:
    """`rotation_signs` on a device."""
    return rotation_signs(block).to(device)


@triton.jit
def hadamard_rows(x, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG_BLOCK: tl.constexpr):
    """Hadamard transform of every row of a float32 ``[ROWS, BLOCK]`` tile, not normalised; BLOCK = 2^LOG_BLOCK."""
    for i in tl.static_range(LOG_BLOCK):
        pairs = tl.permute(tl.reshape(x, (ROWS * (BLOCK >> (i + 1)), 2, 1 << i)), (0, 2, 1))
        a, b = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROWS, BLOCK))
    return x


@triton.jit
def unrotate_tile(x, signs_ptr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG_BLOCK: tl.constexpr):
    """Inverse rotation of float32 ``[ROWS, PADDED]``."""
    x = hadamard_rows(tl.reshape(x, (ROWS * PADDED // BLOCK, BLOCK)), ROWS * PADDED // BLOCK, BLOCK, LOG_BLOCK)
    signs = tl.load(signs_ptr + tl.arange(0, PADDED) % BLOCK)
    return tl.reshape(x, (ROWS, PADDED)) * (signs * (1.0 / BLOCK))[None, :]


@triton.jit
def _rotate_kernel(
    x_ptr,
    signs_ptr,
    out_ptr,
    rows,
    token_stride,
    head_stride,
    heads,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG_BLOCK: tl.constexpr,
):
    """One row is one Hadamard block of one head; the output is contiguous."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    token = (row // (heads * BLOCKS)).to(tl.int64)
    source = token * token_stride + row // BLOCKS % heads * head_stride + row % BLOCKS * BLOCK
    ok = (row < rows)[:, None]
    x = tl.load(x_ptr + source[:, None] + column[None, :], mask=ok, other=0.0).to(tl.float32)
    x = hadamard_rows(x * tl.load(signs_ptr + column)[None, :], ROWS, BLOCK, LOG_BLOCK)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * BLOCK + column[None, :], x.to(out_ptr.dtype.element_ty), mask=ok)


def rotate_rows(x: torch.Tensor, out: torch.Tensor) -> None:
    """`layout.rotate` of ``[tokens, heads, D]`` into a contiguous tensor of the same shape, computed in float32."""
    tokens, heads, size = x.shape
    block = rotation_block(size)
    rows = tokens * heads * (size // block)
    tile = 16 if rows >= 4096 else 1
    _rotate_kernel[(triton.cdiv(rows, tile),)](
        x,
        device_signs(block, x.device),
        out,
        rows,
        x.stride(0),
        x.stride(1),
        heads,
        BLOCKS=size // block,
        ROWS=tile,
        BLOCK=block,
        LOG_BLOCK=block.bit_length() - 1,
        num_warps=4 if tile > 1 else 1,
    )

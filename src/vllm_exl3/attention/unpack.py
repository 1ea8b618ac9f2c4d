"""Unpacking a stretch of one request's cache to 16-bit keys and values, still rotated, for FlashAttention."""

import torch
import triton
import triton.language as tl

__all__ = ["unpack_tokens"]

_TILE = 16


@triton.jit
def _unpack_row(source, target, inside, D: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr):
    """``[TILE]`` rows of nibbles and scale at ``source`` to ``[TILE, D]`` values at ``target``."""
    index = tl.arange(0, WORDS)
    source = source.to(tl.pointer_type(tl.int32))
    words = tl.load(source[:, None] + index[None, :], mask=inside[:, None] & (index < D // 8)[None, :], other=0)
    word = tl.load(source + D // 8, mask=inside, other=0)
    scale = (word & -16).to(tl.float32, bitcast=True)
    nibbles = (words[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 0xF
    values = (nibbles - (word & 0xF)[:, None, None]).to(tl.float32) * scale[:, None, None]
    column = tl.arange(0, 8 * WORDS)
    tl.store(
        target[:, None] + column[None, :],
        tl.reshape(values, (TILE, 8 * WORDS)).to(target.dtype.element_ty),
        mask=inside[:, None] & (column < D)[None, :],
    )


@triton.jit
def _unpack_kernel(
    cache_ptr,
    pages_ptr,
    key_ptr,
    value_ptr,
    begin,
    count,
    page_stride,
    head_stride,
    slot_stride,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: (tile of tokens, KV head). Strides of the cache are in bytes; the outputs are ``[count, kv_heads, D]``."""
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    inside = token < count
    position = begin + token
    page = tl.load(pages_ptr + position // PAGE, mask=inside, other=0).to(tl.int64)
    source = cache_ptr + page * page_stride + head.to(tl.int64) * head_stride + position % PAGE * slot_stride
    target = (token.to(tl.int64) * tl.num_programs(1) + head) * D
    _unpack_row(source, key_ptr + target, inside, D, WORDS, TILE)
    _unpack_row(source + (D // 2 + 4), value_ptr + target, inside, D, WORDS, TILE)


def unpack_tokens(cache: torch.Tensor, pages: torch.Tensor, begin: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write rotated keys and values of consecutive tokens of one request.

    Args:
        cache: uint8 ``[pages, kv_heads, page, D + 8]``, any strides that are multiples of 4 but 1 in the last.
        pages: int32, the request's row of the page table.
        begin: the first token.
        key: ``[tokens, kv_heads, D]`` contiguous, of any floating point type: how many tokens, and where they go.
        value: the same.
    """
    count, kv_heads, size = key.shape
    _unpack_kernel[(triton.cdiv(count, _TILE), kv_heads)](
        cache,
        pages,
        key,
        value,
        begin,
        count,
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        PAGE=cache.shape[2],
        D=size,
        WORDS=triton.next_power_of_2(size) // 8,
        TILE=_TILE,
        num_warps=4,
    )

"""The write kernel: rotate, quantize and store new keys and values in one launch.

Same format as vLLM's writer (see `layout`), which takes ten launches, rounds the rotated values to bfloat16 first, and
clamps rows whose values all have one sign.
"""

import torch
import triton
import triton.language as tl

from vllm_exl3.attention.layout import content_bytes, rotation_block
from vllm_exl3.attention.rotation import device_signs, hadamard_rows

__all__ = ["write_tokens"]

_SMALLEST_SCALE = tl.constexpr(1e-6)


@triton.jit
def _write_row(
    source_ptr, slot_ptr, signs_ptr, D: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, LOG_BLOCK: tl.constexpr
):
    """Quantize one row of D values to ``slot_ptr``: D/2 bytes of nibbles and the scale."""
    column = tl.arange(0, PADDED)
    inside = column < D
    x = tl.load(source_ptr + column, mask=inside, other=0.0).to(tl.float32) * tl.load(signs_ptr + column % BLOCK)
    x = hadamard_rows(tl.reshape(x, (PADDED // BLOCK, BLOCK)), PADDED // BLOCK, BLOCK, LOG_BLOCK)
    x = tl.reshape(x, (PADDED,))
    # Columns beyond D are zero, and zero is always inside the range.
    low = tl.minimum(tl.min(x, 0), 0.0)
    high = tl.maximum(tl.max(x, 0), 0.0)
    scale = tl.maximum((high - low) / 15.0, _SMALLEST_SCALE)
    zero = tl.minimum(tl.floor(-low / scale + 0.5), 15.0)
    nibble = tl.floor(x / scale + zero + 0.5)
    nibble = tl.minimum(tl.maximum(nibble, 0.0), 15.0).to(tl.int32)
    words = tl.sum(tl.reshape(nibble, (PADDED // 8, 8)) << (tl.arange(0, 8) * 4)[None, :], 1)
    index = tl.arange(0, PADDED // 8)
    target = slot_ptr.to(tl.pointer_type(tl.int32))
    tl.store(target + index, words, mask=index < D // 8)
    tl.store(target + D // 8, (scale.to(tl.int32, bitcast=True) & -16) | zero.to(tl.int32))


@triton.jit
def _write_kernel(
    key_ptr,
    value_ptr,
    cache_ptr,
    slots_ptr,
    signs_ptr,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    page_stride,
    head_stride,
    slot_stride,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG_BLOCK: tl.constexpr,
):
    """Grid: (token, KV head). Strides of the cache are in bytes."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    target = cache_ptr + slot // PAGE * page_stride + head * head_stride + slot % PAGE * slot_stride
    source = key_ptr + token * key_token_stride + head * key_head_stride
    _write_row(source, target, signs_ptr, D, PADDED, BLOCK, LOG_BLOCK)
    source = value_ptr + token * value_token_stride + head * value_head_stride
    _write_row(source, target + (D // 2 + 4), signs_ptr, D, PADDED, BLOCK, LOG_BLOCK)


def write_tokens(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Quantize tokens into the cache.

    Args:
        key: ``[tokens or more, kv_heads, D]`` of any floating point type, last dimension contiguous.
        value: the same.
        cache: uint8 ``[pages, kv_heads, page, D + 8]``, any strides that are multiples of 4 but 1 in the last.
        slots: integers ``[tokens]``: page·(tokens a page) + slot; negative ones are left out.
    """
    size, tokens = key.shape[2], slots.shape[0]
    assert cache.shape[-1] == content_bytes(size) and cache.stride(3) == 1
    block = rotation_block(size)
    _write_kernel[(tokens, cache.shape[1])](
        key,
        value,
        cache,
        slots,
        device_signs(block, key.device),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        PAGE=cache.shape[2],
        D=size,
        PADDED=triton.next_power_of_2(size),
        BLOCK=block,
        LOG_BLOCK=block.bit_length() - 1,
        num_warps=1 if size <= 256 else 2,
    )

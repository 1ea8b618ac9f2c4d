"""The read kernel: attention of query tokens over the int4 cache, whole or in segments of the context.

Rows are (query token, head of the group) pairs of one KV head. The products are transposed: keys and values, which
come as nibbles, are the left operand in registers, so that one unpacking serves all rows and a tile of scores holds
no more columns than there are rows.

Exactness. Nibbles are exact in float16. The zero-points of keys are applied in float32 to the same rounded queries
that the tensor core saw, those of values to the nibbles, exactly: tensor cores truncate when they accumulate, and a
sum of thousands of terms that are not centred would drift. Queries are brought to float16 by a power of two. The scale
of a value goes into the exponent of its weight before that is rounded, so that weights lie between 0 and 2¹⁴ whatever
the scales are: 29 bits of range at float16's full precision.
"""

import triton
import triton.language as tl

from vllm_exl3.attention.nibbles import centred_nibbles, log2_of_positive, raised_nibbles, reciprocal
from vllm_exl3.attention.rotation import hadamard_rows, unrotate_tile

__all__ = ["LOG2_E", "LONG_QUERY", "LOWEST", "attend_kernel", "tile_range"]

LOG2_E = tl.constexpr(1.4426950408889634)
"""Scores are in binary logarithms: `exp2` is one instruction."""
LONG_QUERY = tl.constexpr(64)
"""Query tokens from which a request's work, rather than its context, says who attends it."""
LOWEST = tl.constexpr(-1e30)
"""Stands for minus infinity as a running maximum: differences of it are not NaN."""


@triton.jit
def _find_request(starts_ptr, block, requests, BLOCK_Q: tl.constexpr):
    """The request of a query block, where request i begins at block starts[i] // BLOCK_Q + i."""
    low, high = 0, requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def tile_range(length, first_position, last_position, segment, segments, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The tiles ``[begin, end)`` of one of the segments of the keys that positions first to last see."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // TILE
    tiles = (tl.minimum(last_position + 1, length) + TILE - 1) // TILE - begin
    return begin + tiles * segment // segments, begin + tiles * (segment + 1) // segments


@triton.jit
def _offset(page, page_stride, slot, WIDE: tl.constexpr):
    """Bytes before a slot; in 32 bits, a third of the instructions, where the cache is smaller than 4 GiB."""
    if WIDE:
        return page.to(tl.uint32).to(tl.uint64) * page_stride.to(tl.uint32).to(tl.uint64) + slot.to(tl.uint64)
    else:
        return (page.to(tl.uint32) * page_stride.to(tl.uint32) + slot.to(tl.uint32)).to(tl.uint64)


@triton.jit
def _product(a, b, c, ASM: tl.constexpr):
    """a·b + c of float16 tiles, in float32."""
    if ASM:
        return tl.dot(a, b, c)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c)


@triton.jit
def _load_queries(
    query_ptr,
    signs_ptr,
    offset,
    ok,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG_BLOCK: tl.constexpr,
):
    """Rotated queries as float16 tiles ``[PADDED/4, ROWS]``, element 4w + j in tile j, and what a 1 in them means."""
    column = tl.arange(0, PADDED)
    x = tl.load(query_ptr + offset[:, None] + column[None, :], mask=ok[:, None] & (column < D)[None, :], other=0.0)
    x = x.to(tl.float32) * tl.load(signs_ptr + column % BLOCK)[None, :]
    x = hadamard_rows(tl.reshape(x, (ROWS * PADDED // BLOCK, BLOCK)), ROWS * PADDED // BLOCK, BLOCK, LOG_BLOCK)
    x = tl.reshape(x, (ROWS, PADDED))
    largest = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), 1e-30)
    unit = tl.exp2(8.0 - tl.ceil(tl.log2(largest)))
    even, odd = tl.split(tl.reshape((x * unit).to(tl.float16), (ROWS, PADDED // 4, 2, 2)))
    q0, q2 = tl.split(even)
    q1, q3 = tl.split(odd)
    return tl.trans(q0), tl.trans(q1), tl.trans(q2), tl.trans(q3), 1.0 / unit


@triton.jit(do_not_specialize=["requests", "segments", "max_query", "middle_context"])
def attend_kernel(  # noqa: PLR0912, PLR0915  one kernel
    query_ptr,
    cache_ptr,
    table_ptr,
    lengths_ptr,
    starts_ptr,
    signs_ptr,
    sinks_ptr,
    output_ptr,
    partial_ptr,
    stats_ptr,
    requests,
    segments,
    min_query,
    max_query,
    middle_context,
    long_work,
    scale,
    soft_cap,
    page_stride,
    head_stride,
    table_stride,
    query_stride,
    output_stride,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    SLOT: tl.constexpr,
    WIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    RAGGED: tl.constexpr,
    ASM: tl.constexpr,
):
    """Attend one block of query rows of one KV head to one segment of the context.

    Grid: (segment, KV head · HEAD_BLOCKS, query block). Query blocks count as in `_find_request` if RAGGED, else there
    are cdiv(max_query, BLOCK_Q) a request. Left alone are requests of fewer than ``min_query`` or more than
    ``max_query`` query tokens, those of fewer than LONG_QUERY over ``middle_context`` and more earlier tokens, and
    those of LONG_QUERY and more whose query tokens times all tokens are ``long_work`` and more.
    Strides of the cache, and SLOT, are in bytes. If SPLIT, the result goes to ``partial_ptr`` (element 4w + j of
    a row at j·PADDED/4 + w) and ``stats_ptr`` for `merge.merge_kernel`; else there is one segment.
    """
    WORDS: tl.constexpr = PADDED // 4
    segment = tl.program_id(0)
    head = tl.program_id(1) // HEAD_BLOCKS
    head_block = tl.program_id(1) % HEAD_BLOCKS
    block = tl.program_id(2)
    if RAGGED:
        request = _find_request(starts_ptr, block, requests, BLOCK_Q)
        start = tl.load(starts_ptr + request)
        block = block - (start // BLOCK_Q + request)
    else:
        q_blocks = (max_query + BLOCK_Q - 1) // BLOCK_Q
        request = block // q_blocks
        block = block % q_blocks
        start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    length = tl.load(lengths_ptr + request)
    context = length - count
    if (count < min_query) | (count > max_query) | (block * BLOCK_Q >= count):
        return
    if count < LONG_QUERY:
        if context >= middle_context:
            return
    elif count.to(tl.float32) * length >= long_work:
        return

    row = tl.arange(0, ROWS)
    if HEAD_BLOCKS == 1:
        token = block * BLOCK_Q + row // GROUP
        in_group = row % GROUP
        ok = (token < count) & (row < BLOCK_Q * GROUP)
    else:
        token = block * BLOCK_Q + row * 0
        in_group = head_block * ROWS + row
        ok = in_group < GROUP
    first = context + block * BLOCK_Q
    last = tl.minimum(first + BLOCK_Q, length) - 1
    begin, end = tile_range(length, first, last, segment, segments, WINDOW, TILE)
    if SPLIT:  # noqa: SIM102  the outer one is known while compiling
        if begin >= end:
            return

    query_head = head * GROUP + in_group
    q_offset = (start + token).to(tl.int64) * query_stride + query_head * D
    q0, q1, q2, q3, unit = _load_queries(query_ptr, signs_ptr, q_offset, ok, D, PADDED, ROWS, BLOCK, LOG_BLOCK)
    # Odd streams of K come 16 times too large, and all come with 1024 added, which the products start by taking off.
    q_even = tl.sum(q0.to(tl.float32) + q2.to(tl.float32), 0)
    q_odd = tl.sum(q1.to(tl.float32) + q3.to(tl.float32), 0)
    q_sum = q_even + q_odd
    raised = tl.broadcast_to((-1024.0 * (q_even + q_odd * 0.0625))[None, :], [TILE, ROWS])
    q1 = (q1.to(tl.float32) * 0.0625).to(tl.float16)
    q3 = (q3.to(tl.float32) * 0.0625).to(tl.float16)
    scale = scale * unit
    position = context + token

    word = tl.arange(0, WORDS)
    t = tl.arange(0, TILE)
    pages = table_ptr + request.to(tl.int64) * table_stride
    cache = cache_ptr + head.to(tl.int64) * head_stride
    # Where pages do not straddle tiles, a thread's slots are the same in every tile.
    slots = t % PAGE * SLOT

    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([TILE, ROWS], tl.float32)
    o0 = tl.zeros([WORDS, ROWS], tl.float32)
    o1 = tl.zeros([WORDS, ROWS], tl.float32)
    o2 = tl.zeros([WORDS, ROWS], tl.float32)
    o3 = tl.zeros([WORDS, ROWS], tl.float32)
    for tile in range(begin, end):
        key = tile * TILE + t
        if TILE % PAGE == 0:
            page = tl.load(pages + tile * (TILE // PAGE) + t // PAGE, mask=key < length, other=0)
            slot_at = cache + _offset(page, page_stride, slots, WIDE)
        else:
            index = key // PAGE
            page = tl.load(pages + index, mask=key < length, other=0)
            slot_at = cache + _offset(page, page_stride, (key - index * PAGE) * SLOT, WIDE)
        at16 = slot_at.to(tl.pointer_type(tl.int16))
        at32 = slot_at.to(tl.pointer_type(tl.int32))
        key_at = at16[:, None] + word[None, :]
        value_at = at16[None, :] + (D // 4 + 2) + word[:, None]
        if D == PADDED:
            key_words = tl.load(key_at)
            value_words = tl.load(value_at)
        else:
            key_words = tl.load(key_at, mask=(word < D // 4)[None, :], other=0)
            value_words = tl.load(value_at, mask=(word < D // 4)[:, None], other=0)
        key_scale = tl.load(at32 + D // 8)
        value_scale = tl.load(at32 + (D // 4 + 1))

        s = _product(raised_nibbles(key_words, 0, ASM), q0, raised, ASM)
        s = _product(raised_nibbles(key_words, 1, ASM), q1, s, ASM)
        s = _product(raised_nibbles(key_words, 2, ASM), q2, s, ASM)
        s = _product(raised_nibbles(key_words, 3, ASM), q3, s, ASM)
        key_zero = (key_scale & 0xF).to(tl.float32)
        key_factor = (key_scale & -16).to(tl.float32, bitcast=True) * scale
        s = (s - key_zero[:, None] * q_sum[None, :]) * key_factor[:, None]
        if SOFT_CAP:
            s = soft_cap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2_E / soft_cap)) + 1.0)) * LOG2_E
        seen = key[:, None] <= position[None, :]
        if WINDOW > 0:
            seen = seen & (key[:, None] > (position - WINDOW)[None, :])
        s = tl.where(seen, s, float("-inf"))
        # A slot past the end may hold any bits, and vLLM points pages before the window at one of zeros: such a scale
        # must not make 0·NaN or 0·∞ of its zero weight.
        written = key < length
        if WINDOW > 0:
            written = written & (key > first - WINDOW)
        value_factor = tl.where(written, (value_scale & -16).to(tl.float32, bitcast=True), 1.0)
        s += log2_of_positive(value_factor, ASM)[:, None]
        new_top = tl.maximum(top, tl.max(s, 0) - 14.0)
        decay = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[None, :])
        top = new_top
        total = total * decay[None, :] + p * reciprocal(value_factor, ASM)[:, None]
        weights = p.to(tl.float16)
        zeros = (value_scale & 0xF).to(tl.float16)
        o0 = _product(centred_nibbles(value_words, zeros, 0, ASM), weights, o0 * decay[None, :], ASM)
        o1 = _product(centred_nibbles(value_words, zeros, 1, ASM), weights, o1 * decay[None, :], ASM)
        o2 = _product(centred_nibbles(value_words, zeros, 2, ASM), weights, o2 * decay[None, :], ASM)
        o3 = _product(centred_nibbles(value_words, zeros, 3, ASM), weights, o3 * decay[None, :], ASM)

    denominator = tl.sum(total, 0)
    if SPLIT:
        index = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
        at = (index.to(tl.int64) * segments + segment) * ROWS + row
        out = partial_ptr + (at * PADDED)[None, :] + word[:, None]
        tl.store(out, o0, mask=ok[None, :])
        tl.store(out + WORDS, o1, mask=ok[None, :])
        tl.store(out + 2 * WORDS, o2, mask=ok[None, :])
        tl.store(out + 3 * WORDS, o3, mask=ok[None, :])
        tl.store(stats_ptr + at * 2, top, mask=ok)
        tl.store(stats_ptr + at * 2 + 1, denominator, mask=ok)
    else:
        if SINKS:
            sink = tl.load(sinks_ptr + query_head, mask=ok, other=0.0).to(tl.float32) * LOG2_E
            denominator += tl.exp2(sink - top)
        inverse = 1.0 / denominator
        even = tl.join(o0 * inverse[None, :], o2 * inverse[None, :])
        odd = tl.join(o1 * inverse[None, :], o3 * inverse[None, :])
        x = tl.reshape(tl.permute(tl.join(even, odd), (1, 0, 2, 3)), (ROWS, PADDED))
        x = unrotate_tile(x, signs_ptr, PADDED, ROWS, BLOCK, LOG_BLOCK)
        column = tl.arange(0, PADDED)
        out = (start + token).to(tl.int64) * output_stride + query_head * D
        tl.store(
            output_ptr + out[:, None] + column[None, :],
            x.to(output_ptr.dtype.element_ty),
            mask=ok[:, None] & (column < D)[None, :],
        )

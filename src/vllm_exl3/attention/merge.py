"""Adding up the segments that `attend_kernel` left."""

import triton
import triton.language as tl

from vllm_exl3.attention.attend import LOG2_E, LOWEST, tile_range
from vllm_exl3.attention.rotation import unrotate_tile

__all__ = ["merge_kernel"]


@triton.jit(do_not_specialize=["segments", "max_query"])
def merge_kernel(
    partial_ptr,
    stats_ptr,
    lengths_ptr,
    starts_ptr,
    signs_ptr,
    sinks_ptr,
    output_ptr,
    segments,
    max_query,
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
    STEP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Add up the segments of one query token and head, and rotate the sum back.

    Grid: (query head, request · max_query).
    """
    WORDS: tl.constexpr = PADDED // 4
    query_head = tl.program_id(0)
    request = tl.program_id(1) // max_query
    token = tl.program_id(1) % max_query
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    if (count > max_query) | (token >= count):
        return
    length = tl.load(lengths_ptr + request)
    head = query_head // GROUP
    in_group = query_head % GROUP
    block = token // BLOCK_Q
    if HEAD_BLOCKS == 1:
        row = token % BLOCK_Q * GROUP + in_group
        head_program = head
    else:
        row = in_group % ROWS
        head_program = head * HEAD_BLOCKS + in_group // ROWS
    first = length - count + block * BLOCK_Q
    last = tl.minimum(first + BLOCK_Q, length) - 1
    programs = tl.num_programs(0) // GROUP * HEAD_BLOCKS
    index = (request * ((max_query + BLOCK_Q - 1) // BLOCK_Q) + block) * programs + head_program
    at = index.to(tl.int64) * segments * ROWS + row

    column = tl.arange(0, PADDED)
    source = partial_ptr + at * PADDED + column % 4 * WORDS + column // 4
    part = tl.arange(0, STEP)
    top = tl.full([1], LOWEST, tl.float32)
    denominator = tl.zeros([1], tl.float32)
    x = tl.zeros([PADDED], tl.float32)
    for step in range(0, segments, STEP):
        segment = step + part
        begin, end = tile_range(length, first, last, segment, segments, WINDOW, TILE)
        filled = (begin < end) & (segment < segments)
        stat = stats_ptr + (at + segment * ROWS) * 2
        tops = tl.load(stat, mask=filled, other=LOWEST)
        totals = tl.load(stat + 1, mask=filled, other=0.0)
        tile = tl.load(source[None, :] + (segment * ROWS * PADDED)[:, None], mask=filled[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        decay = tl.exp2(top - new_top)
        weights = tl.exp2(tops - new_top)
        denominator = denominator * decay + tl.sum(totals * weights, 0)
        x = x * decay + tl.sum(tile * weights[:, None], 0)
        top = new_top
    if SINKS:
        denominator += tl.exp2(tl.load(sinks_ptr + query_head).to(tl.float32) * LOG2_E - top)
    x = tl.reshape(x / denominator, (1, PADDED))
    x = tl.reshape(unrotate_tile(x, signs_ptr, PADDED, 1, BLOCK, LOG_BLOCK), (PADDED,))
    out = output_ptr + (start + token).to(tl.int64) * output_stride + query_head * D + column
    tl.store(out, x.to(output_ptr.dtype.element_ty), mask=column < D)

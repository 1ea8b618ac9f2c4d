// Sorting slots by expert and listing the row blocks and chunks, in one thread block: a stable counting sort, so that equal
// routings give equal lists. Each warp counts and places a contiguous range of slots.
#pragma once
#include "moe_problem.cuh"

__device__ __forceinline__ u32 tile_rows(const MoeArgs& args, u32 size) {
    return size > args.fat_rows ? args.tile_rows : args.thin_rows;
}

// Calls `each(slot, expert)` for every slot of the warp's range, 32 at a time; slots beyond it have expert -1. Ids are read
// some steps ahead.
template <class Each>
__device__ __forceinline__ void for_slots(const MoeArgs& args, u32 begin, u32 end, u32 lane, const Each& each) {
    constexpr int AHEAD = 8;
    for (u32 base = begin; base < end; base += 32 * AHEAD) {
        int experts[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) experts[i] = base + 32 * i + lane < end ? expert_of(args, base + 32 * i + lane) : -1;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (base + 32 * i < end) each(base + 32 * i + lane, experts[i]);
    }
}

// Shared memory: counts [warps][experts], then sizes, starts, first row blocks and first chunks [experts].
__device__ __forceinline__ void route(const MoeArgs& args, u32* memory) {
    const u32 experts = args.experts, warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    u32 *sizes = memory + warps * experts, *starts = sizes + experts, *first_blocks = starts + experts, *first_chunks = first_blocks + experts;
    u32* counts = memory + warp * experts;
    const u32 share = (args.slots + 32 * warps - 1) / (32 * warps) * 32;
    const u32 begin = min(warp * share, args.slots), end = min(begin + share, args.slots);
    for (u32 i = threadIdx.x; i < warps * experts; i += blockDim.x) memory[i] = 0;
    __syncthreads();
    for_slots(args, begin, end, lane, [&](u32, int expert) {
        const u32 same = __match_any_sync(0xffffffffu, expert);
        if (expert >= 0 && lane == __ffs(same) - 1) counts[expert] += __popc(same);
        __syncwarp();
    });
    __syncthreads();
    for (u32 expert = threadIdx.x; expert < experts; expert += blockDim.x) {
        u32 before = 0;
        for (u32 w = 0; w < warps; ++w) {
            const u32 count = memory[w * experts + expert];
            memory[w * experts + expert] = before;
            before += count;
        }
        sizes[expert] = before;
    }
    __syncthreads();
    if (warp == 0) {
        u32 start = 0, block = 0, chunk = 0;
        for (u32 base = 0; base < experts; base += 32) {
            const u32 size = base + lane < experts ? sizes[base + lane] : 0;
            const u32 rows = (size + args.row_padding - 1) / args.row_padding * args.row_padding;
            const u32 tile = tile_rows(args, size), count = (size + tile - 1) / tile;
            const u32 pieces = (size + CHUNK_ROWS - 1) / CHUNK_ROWS;
            u32 row_sum = rows, block_sum = count, chunk_sum = pieces;
            for (u32 step = 1; step < 32; step *= 2) {
                const u32 r = __shfl_up_sync(0xffffffffu, row_sum, step), b = __shfl_up_sync(0xffffffffu, block_sum, step),
                          c = __shfl_up_sync(0xffffffffu, chunk_sum, step);
                if (lane >= step) row_sum += r, block_sum += b, chunk_sum += c;
            }
            if (base + lane < experts) {
                args.starts[base + lane] = starts[base + lane] = start + row_sum - rows;
                first_blocks[base + lane] = block + block_sum - count;
                first_chunks[base + lane] = chunk + chunk_sum - pieces;
            }
            start += __shfl_sync(0xffffffffu, row_sum, 31);
            block += __shfl_sync(0xffffffffu, block_sum, 31);
            chunk += __shfl_sync(0xffffffffu, chunk_sum, 31);
        }
        if (lane == 0) args.list_sizes[0] = block, args.list_sizes[1] = chunk, args.starts[experts] = start;
    }
    __syncthreads();
    for (u32 expert = threadIdx.x; expert < experts; expert += blockDim.x) {
        const u32 size = sizes[expert], tile = tile_rows(args, size);
        for (u32 row = 0, block = first_blocks[expert]; row < size; row += tile, ++block)
            args.blocks[block] = {expert, starts[expert] + row, min(tile, size - row), 0};
        if (args.grouped)
            for (u32 row = 0, chunk = first_chunks[expert]; row < size; row += CHUNK_ROWS, ++chunk)
                args.chunks[chunk] = {expert, starts[expert] + row, min(CHUNK_ROWS, size - row), 0};
    }
    for_slots(args, begin, end, lane, [&](u32 slot, int expert) {
        const u32 same = __match_any_sync(0xffffffffu, expert);
        u32 place = NOWHERE;
        if (expert >= 0) place = starts[expert] + counts[expert] + __popc(same & ((1u << lane) - 1));
        if (slot < end) args.places[slot] = place;
        if (place != NOWHERE) args.order[place] = slot;
        __syncwarp();
        if (expert >= 0 && lane == __ffs(same) - 1) counts[expert] += __popc(same);
        __syncwarp();
    });
}

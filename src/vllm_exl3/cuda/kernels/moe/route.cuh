// Sorting slots by expert and listing the row blocks and chunks: a stable counting sort, so that equal routings give equal
// lists. Each thread block, and of it each warp, counts and places a contiguous range of slots. Where there are several blocks
// a kernel of its own has counted their experts, and every block adds up what it needs.
#pragma once
#include "moe/arguments.cuh"

// Rows of an expert's row blocks: as few blocks as its tile allows, as equal as the padding allows.
__device__ __forceinline__ u32 tile_rows(const MoeArgs& args, u32 size) {
    const u32 most = size > args.fat_rows ? args.tile_rows : args.thin_rows;
    if (size <= most) return most;  // divisions cost: a single warp adds all experts up
    const u32 count = (size + most - 1) / most, even = (size + count - 1) / count;
    return (even + args.row_padding - 1) / args.row_padding * args.row_padding;
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

// Slots begin..end of one of `parts` equal parts.
struct SlotRange {
    u32 begin, end;
    __device__ __forceinline__ SlotRange(u32 first, u32 last, u32 part, u32 parts) {
        const u32 share = (last - first + 32 * parts - 1) / (32 * parts) * 32;
        begin = min(first + part * share, last), end = min(begin + share, last);
    }
};

// Counts the experts of one thread block's slots. Shared memory: counts [experts].
__device__ __forceinline__ void count_experts(const MoeArgs& args, u32* counts) {
    const SlotRange range(0, args.slots, blockIdx.x, gridDim.x);
    for (u32 i = threadIdx.x; i < args.experts; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for (u32 slot = range.begin + threadIdx.x; slot < range.end; slot += blockDim.x) {
        const int expert = expert_of(args, slot);
        if (expert >= 0) atomicAdd(&counts[expert], 1u);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < args.experts; i += blockDim.x) args.totals[blockIdx.x * args.experts + i] = counts[i];
}

// How many rows an expert has, and how many of them come before part `part`.
__device__ __forceinline__ uint2 add_parts(const MoeArgs& args, u32 expert, u32 part, u32 parts) {
    uint2 sum = make_uint2(0, 0);
#pragma unroll 8
    for (u32 i = 0; i < parts; ++i) {
        const u32 count = args.totals[i * args.experts + expert];
        sum.x += count, sum.y += i < part ? count : 0;
    }
    return sum;
}

// Lists chunks of CHUNK_ROWS rows: every expert's first, then every expert's second and so on, so that the tokens in work at
// one time are few and their x stays in the L2.
__device__ __forceinline__ void list_chunks(const MoeArgs& args, const u32* sizes, const u32* starts, u32 warp, u32 warps, u32 lane) {
    u32 most = 0;
    for (u32 expert = lane; expert < args.experts; expert += 32) most = max(most, sizes[expert]);
    most = __reduce_max_sync(0xffffffffu, most);
    for (u32 chunk = warp; chunk * CHUNK_ROWS < most; chunk += warps) {
        u32 place = 0;  // chunks before, of all experts
        for (u32 expert = lane; expert < args.experts; expert += 32) place += min((sizes[expert] + CHUNK_ROWS - 1) / CHUNK_ROWS, chunk);
        place = __reduce_add_sync(0xffffffffu, place);
        for (u32 base = 0; base < args.experts; base += 32) {
            const u32 expert = base + lane, row = chunk * CHUNK_ROWS, size = expert < args.experts ? sizes[expert] : 0;
            const u32 have = __ballot_sync(0xffffffffu, size > row);
            if (size > row) args.chunks[place + __popc(have & ((1u << lane) - 1))] = {expert, starts[expert] + row, min(CHUNK_ROWS, size - row), 0};
            place += __popc(have);
        }
    }
}

// One block: part `part` of `parts`. Shared memory: counts [warps][experts], then sizes, starts and first row blocks [experts].
__device__ __forceinline__ void route(const MoeArgs& args, u32* memory, u32 part, u32 parts) {
    const u32 experts = args.experts, warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    u32 *sizes = memory + warps * experts, *starts = sizes + experts, *first_blocks = starts + experts;
    u32* counts = memory + warp * experts;
    const SlotRange block(0, args.slots, part, parts), range(block.begin, block.end, warp, warps);
    const u32 begin = range.begin, end = range.end;
    for (u32 i = threadIdx.x; i < warps * experts; i += blockDim.x) memory[i] = 0;
    __syncthreads();
    for_slots(args, begin, end, lane, [&](u32, int expert) {
        const u32 same = __match_any_sync(0xffffffffu, expert);
        if (expert >= 0 && lane == __ffs(same) - 1) counts[expert] += __popc(same);
        __syncwarp();
    });
    __syncthreads();
    for (u32 expert = threadIdx.x; expert < experts; expert += blockDim.x) {
        const uint2 all = parts > 1 ? add_parts(args, expert, part, parts) : make_uint2(0, 0);
        u32 before = all.y;
        for (u32 w = 0; w < warps; ++w) {
            const u32 count = memory[w * experts + expert];
            memory[w * experts + expert] = before;
            before += count;
        }
        sizes[expert] = parts > 1 ? all.x : before;
    }
    __syncthreads();
    if (warp == 0) {
        u32 start = 0, block = 0, chunk = 0;
        for (u32 base = 0; base < experts; base += 32) {
            const u32 size = base + lane < experts ? sizes[base + lane] : 0;
            const u32 rows = (size + args.row_padding - 1) / args.row_padding * args.row_padding;
            const u32 tile = tile_rows(args, size), count = (size + tile - 1) / tile;
            u32 row_sum = rows, block_sum = count;
            for (u32 step = 1; step < 32; step *= 2) {
                const u32 r = __shfl_up_sync(0xffffffffu, row_sum, step), b = __shfl_up_sync(0xffffffffu, block_sum, step);
                if (lane >= step) row_sum += r, block_sum += b;
            }
            if (base + lane < experts) {
                starts[base + lane] = start + row_sum - rows;
                if (part == 0) args.starts[base + lane] = starts[base + lane];
                first_blocks[base + lane] = block + block_sum - count;
            }
            start += __shfl_sync(0xffffffffu, row_sum, 31);
            block += __shfl_sync(0xffffffffu, block_sum, 31);
            chunk += __reduce_add_sync(0xffffffffu, (size + CHUNK_ROWS - 1) / CHUNK_ROWS);
        }
        if (lane == 0 && part == 0) args.list_sizes[0] = block, args.list_sizes[1] = chunk, args.starts[experts] = start;
    }
    __syncthreads();
    for (u32 expert = threadIdx.x * parts + part; expert < experts; expert += blockDim.x * parts) {
        const u32 size = sizes[expert], tile = tile_rows(args, size);
        for (u32 row = 0, block = first_blocks[expert]; row < size; row += tile, ++block)
            args.blocks[block] = {expert, starts[expert] + row, min(tile, size - row), 0};
    }
    if (args.grouped) list_chunks(args, sizes, starts, part * warps + warp, parts * warps, lane);
    for_slots(args, begin, end, lane, [&](u32 slot, int expert) {
        const u32 same = __match_any_sync(0xffffffffu, expert);
        u32 place = NOWHERE;
        if (expert >= 0) place = starts[expert] + counts[expert] + __popc(same & ((1u << lane) - 1));
        if (slot < end) args.slot_positions[slot] = place;
        if (place != NOWHERE) args.sorted_slots[place] = slot;
        __syncwarp();
        if (expert >= 0 && lane == __ffs(same) - 1) counts[expert] += __popc(same);
        __syncwarp();
    });
}

// The largest magnitude of a warp's eight-value vectors of 16-bit floats, as their bits.
__device__ __forceinline__ u32 largest_bits(const u16* values, u32 count, u32 lane) {
    u32 bits = 0;
#pragma unroll 4
    for (u32 i = 8 * lane; i < count; i += 256) {
        const uint4 raw = *reinterpret_cast<const uint4*>(values + i);
        const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) bits = max(bits, max(words[w] & 0x7fffu, words[w] >> 16 & 0x7fffu));
    }
    return __reduce_max_sync(0xffffffffu, bits);
}

__device__ __forceinline__ float largest_input(const MoeArgs& args, u32 token, u32 lane) {
    const i64 row = token * args.x_stride;
    const u32 width = args.stages[0].in_width;
    if (args.x_type != F32 && (args.x_stride | width) % 8 == 0 && reinterpret_cast<u64>(args.x) % 16 == 0) {
        const u32 bits = largest_bits(static_cast<const u16*>(args.x) + row, width, lane);
        return args.x_type == F16 ? half_to_float(u16(bits)) : __uint_as_float(bits << 16);
    }
    u32 bits = 0;
    for (u32 channel = lane; channel < width; channel += 32)
        bits = max(bits, __float_as_uint(fabsf(load_element(args.x, row + channel, args.x_type))));
    return __uint_as_float(__reduce_max_sync(0xffffffffu, bits));
}

// The largest magnitudes of every token's values and of the input scales of every expert's first projections. A warp each.
__device__ __forceinline__ void find_largest(const MoeArgs& args, u32 block, u32 blocks) {
    const MoeStage& first = args.stages[0];
    const u32 warps = blockDim.x / 32, lane = threadIdx.x & 31, scales = args.experts * first.projections;
    for (u32 i = block * warps + threadIdx.x / 32; i < args.tokens + scales; i += blocks * warps) {
        if (i < args.tokens) {
            const float largest = largest_input(args, i, lane);
            if (lane == 0) args.row_largest[i] = largest;
        } else {
            const u32 expert = (i - args.tokens) / first.projections, index = (i - args.tokens) % first.projections;
            const u32 bits = largest_bits(first.suh + projection_of(args, expert, first.first + index).suh, first.in_features, lane);
            if (lane == 0) args.scale_largest[i - args.tokens] = half_to_float(u16(bits));
        }
    }
}

// The trellis GEMM for few tokens: y = (A·W·H)·svh + bias for every shard of a fused layer in one launch.
//
// One block per multiprocessor. Each of its WARPS warps takes every WARPS-th unit of the block's range and accumulates a whole
// strip (128 output channels) over its k slices; at the end of a strip the block's warps are added (epilogue.cuh).
#pragma once
#include "epilogue.cuh"

template <class... Ks> struct Kinds {
    static constexpr int columns() {
        int widest = 0;
        ((widest = Ks::columns > widest ? Ks::columns : widest), ...);
        return widest;
    }
};

template <class K, class Shared>
__device__ __forceinline__ void run_segment(const LinearArgs& args, const Segment& segment, u32 segment_end, u32& unit,
                                            Ring& ring, Cursor& cursor, Shared& shared, int warp, int lane) {
    using T = typename Sum<K::arithmetic>::type;
    using W = typename K::Window;
    constexpr u32 tile_bytes = 4 * W::tile_words, row_bytes = HALF_TILES * tile_bytes + ROW_PAD;
    T sums[STRIP_TILES][K::columns][4] = {};
    for (; unit < segment_end; unit += WARPS) {
        u32 b[K::columns][K::matrices];
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            ring.wait(half);
            if (half == 0) load_activations<K>(b, ring.activations(ring.consumed), args.stored_rows, lane);
            const u32 row = ring.weights(ring.consumed, half) + (lane & 3) * row_bytes;
#pragma unroll
            for (int tile = 0; tile < HALF_TILES; ++tile) {
                u32 words[W::words];
                load_words<K::half_bits>(words, SharedWords{row + tile * tile_bytes}, lane);
                multiply_tile<K>(sums[half * HALF_TILES + tile], words, b);
            }
            __syncwarp();
            if (cursor.valid()) ring.fetch<true, true>(cursor, half, lane);
            ring.commit();
        }
        ring.next_consumed();
        ring.next_filled();
        cursor.advance(args, WARPS);
    }
    finish_segment<K>(sums, args, segment, shared, warp, lane);
}

// Runs the segment with the kind that its shard names.
template <class... Ks, class... Rest>
__device__ __forceinline__ void dispatch(Kinds<Ks...>, u32 kind, Rest&&... rest) {
    u32 index = 0;
    ((index++ == kind ? run_segment<Ks>(rest...) : void()), ...);
}

template <int TILE_ROWS, class List>
__device__ __forceinline__ void linear(const LinearArgs& args) {
    using Shared = Epilogue<TILE_ROWS, List::columns()>;
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    // The warp's index is made uniform, so that everything derived from it is computed once a warp.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    constexpr u32 barriers_at = (sizeof(Shared) + 127) / 128 * 128;
    const u32 barrier_bytes = (WARPS * args.ring_units * HALVES * 8 + 127) / 128 * 128;
    const u32 memory_at = shared_address(memory);
    Ring ring;
    ring.init(memory_at + barriers_at + barrier_bytes +
                  warp * args.ring_units * (HALVES * args.half_stride + args.activation_stride),
              memory_at + barriers_at + warp * args.ring_units * HALVES * 8, args, lane);

    u32 begin = range_begin(blockIdx.x, gridDim.x, args.total_units);
    const u32 end = range_begin(blockIdx.x + 1, gridDim.x, args.total_units);
    Cursor cursor{};
    cursor.unit = begin + warp, cursor.end = end;
    if (cursor.valid()) cursor.seek(args);

    // Weights never change: they are fetched before the kernel ahead has finished. All else waits for it.
    Cursor ahead = cursor;
    for (u32 i = 0; i < args.ring_units; ++i) {
        for (int half = 0; half < HALVES; ++half)
            if (ahead.valid()) ring.fetch<true, false>(ahead, half, lane);
        ring.next_filled();
        ahead.advance(args, WARPS);
    }
    let_next_start();
    wait_for_previous();
    for (u32 i = 0; i < args.ring_units; ++i) {
        for (int half = 0; half < HALVES; ++half) {
            if (cursor.valid()) ring.fetch<false, true>(cursor, half, lane);
            ring.commit();
        }
        ring.next_filled();
        cursor.advance(args, WARPS);
    }

    Segment segment{};
    u32 unit = begin + warp;
    while (begin < end) {
        while (segment.shard + 1 < args.shard_count && begin >= args.shards[segment.shard + 1].first_unit) ++segment.shard;
        const ShardArgs& shard = args.shards[segment.shard];
        const u32 depth = shard.in_features / UNIT_IN;
        segment.strip = (begin - shard.first_unit) / depth;
        segment.strip_begin = shard.first_unit + segment.strip * depth;
        segment.strip_end = segment.strip_begin + depth;
        const u32 segment_end = min(end, segment.strip_end);
        segment.complete = begin == segment.strip_begin && segment_end == segment.strip_end;
        dispatch(List{}, shard.kind, args, segment, segment_end, unit, ring, cursor, shared, warp, lane);
        begin = segment_end;
    }
}

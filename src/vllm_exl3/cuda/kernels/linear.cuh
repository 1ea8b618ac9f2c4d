// The trellis GEMM for few tokens: y = (A·W·H)·svh + bias for every shard of a fused layer in one launch.
//
// One block per multiprocessor. Each of its WARPS warps takes every WARPS-th unit of the block's range and accumulates a
// whole strip (128 output channels) over its k slices; at the end of a strip the block's warps are added (epilogue.cuh).
#pragma once
#include "activations.cuh"

template <class... Ks> struct Kinds {
    static constexpr int columns() {
        int widest = 0;
        ((widest = Ks::columns > widest ? Ks::columns : widest), ...);
        return widest;
    }
    static constexpr int half_bits() {  // of all kinds, or 0 where they differ
        int least = 99, most = 0;
        ((least = Ks::half_bits < least ? Ks::half_bits : least, most = Ks::half_bits > most ? Ks::half_bits : most), ...);
        return least == most ? most : 0;
    }
};

// One block's state through its segments.
template <class Shared>
struct Block {
    const LinearArgs& args;
    Shared& shared;
    uint4* slots;    // warps' sums at the end of a strip
    Ring ring;
    Cursor cursor;   // unit that is fetched next
    Planes planes;
    u32 unit;        // unit that this warp multiplies next
    int warp, lane;
};

template <bool PLANES, int HALF_BITS, class K, class Shared>
__device__ __forceinline__ void run_segment(Block<Shared>& block, const Segment& segment, u32 segment_end) {
    using W = typename K::Window;
    constexpr u32 tile_bytes = 4 * W::tile_words, row_bytes = HALF_TILES * tile_bytes + ROW_PAD;
    const LinearArgs& args = block.args;
    Ring& ring = block.ring;
    const int lane = block.lane;
    const u32 depth = segment.strip_end - segment.strip_begin;
    typename Sum<K::arithmetic>::type sums[STRIP_TILES][K::columns][4] = {};
    for (; block.unit < segment_end; block.unit += WARPS) {
        u32 b[K::columns][K::matrices];
        if constexpr (PLANES) block.planes.template load<K>(b, args, block.planes.place(block.unit - segment.strip_begin, depth), lane);
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            ring.wait(half);
            if constexpr (!PLANES)
                if (half == 0) load_fragments<K>(b, ring.activations(ring.consumed), args.stored_rows, lane);
            const u32 row = ring.weights(ring.consumed, half) + (lane & 3) * row_bytes;
#pragma unroll
            for (int tile = 0; tile < HALF_TILES; ++tile) {
                u32 words[W::words];
                load_words<K::half_bits>(words, SharedWords{row + tile * tile_bytes}, lane);
                multiply_tile<K>(sums[half * HALF_TILES + tile], words, b);
            }
            __syncwarp();
            if (block.cursor.valid()) ring.fetch<true, true, HALF_BITS>(block.cursor, half, lane);
            ring.commit();
        }
        ring.next_consumed();
        ring.next_filled();
        block.cursor.advance(args, WARPS);
    }

    // Sum of a token's activations over the segment, from the sums of its units.
    const u32 segment_begin = max(segment.strip_begin, range_begin(args, blockIdx.x));
    const auto token_sums = [&](u32 token) {
        const u32 row = blockIdx.y * args.tile_rows + token;
        int sum = 0;
        for (u32 unit = segment_begin + lane; unit < segment_end; unit += 32) {
            const u32 k = unit - segment.strip_begin;
            sum += PLANES ? block.planes.sums[token * args.plane_units + block.planes.place(k, depth)]
                          : args.sums[args.shards[segment.shard].sum_block + row * depth + k];
        }
        return __reduce_add_sync(0xffffffffu, sum);
    };
    const auto undo = [&](u32 token) {
        if (PLANES) return row_scale(K::arithmetic, block.planes.largest[token]).undo;
        return args.scales[segment.shard * args.rows + blockIdx.y * args.tile_rows + token];
    };
    finish_segment<K>(sums, args, segment, token_sums, undo, block.shared, block.slots, block.warp, lane);
}

// Runs the segment with the kind that its shard names.
template <bool PLANES, class... Ks, class Shared>
__device__ __forceinline__ void dispatch(Kinds<Ks...>, u32 kind, Block<Shared>& block, const Segment& segment, u32 segment_end) {
    u32 index = 0;
    ((index++ == kind ? run_segment<PLANES, Kinds<Ks...>::half_bits(), Ks>(block, segment, segment_end) : void()), ...);
}

template <bool PLANES, int TILE_ROWS, class List>
__device__ __forceinline__ void linear(const LinearArgs& args) {
    using Shared = Epilogue<TILE_ROWS, List::columns()>;
    extern __shared__ __align__(128) u8 memory[];
    // The warp's index is made uniform, so that everything derived from it is computed once a warp.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const u32 begin = range_begin(args, blockIdx.x), end = range_begin(args, blockIdx.x + 1);
    Block<Shared> block{args, *reinterpret_cast<Shared*>(memory)};
    block.warp = warp, block.lane = lane;

    // Shared memory: epilogue, barriers, ring, the warps' sums, then the planes with the rows' sums and maxima before them.
    constexpr u32 barriers_at = (sizeof(Shared) + 127) / 128 * 128;
    const u32 ring_at = barriers_at + (WARPS * args.ring_units * HALVES * 8 + 127) / 128 * 128;
    const u32 ring_bytes = args.ring_units * (HALVES * args.half_stride + args.activation_stride);
    block.ring.init(shared_address(memory) + ring_at + warp * ring_bytes,
                    shared_address(memory) + barriers_at + warp * args.ring_units * HALVES * 8, args, lane);
    block.slots = reinterpret_cast<uint4*>(memory + ring_at + WARPS * ring_bytes);
    Cursor& cursor = block.cursor;
    cursor.unit = begin + warp, cursor.end = end;
    if (cursor.valid()) cursor.seek(args);

    // Weights never change: they are fetched before the kernel ahead has finished. All else waits for it.
    Cursor ahead = cursor;
    for (u32 i = 0; i < args.ring_units; ++i) {
        for (int half = 0; half < HALVES; ++half) {
            if (ahead.valid()) block.ring.template fetch<true, false, List::half_bits()>(ahead, half, lane);
            if (PLANES) block.ring.commit();
        }
        block.ring.next_filled();
        ahead.advance(args, WARPS);
    }
    let_next_start();
    wait_for_previous();
    if constexpr (PLANES) {
        cursor = ahead;
        u8* after = reinterpret_cast<u8*>(block.slots) + args.reduction_slots * args.slot_bytes;
        block.planes.largest = reinterpret_cast<u32*>(after);
        block.planes.sums = reinterpret_cast<int*>(after) + TILE_ROWS;
        block.planes.address = shared_address(after) + ((TILE_ROWS + args.stored_rows * args.plane_units) * 4 + 127) / 128 * 128;
        block.planes.shard = MAX_SHARDS;
    } else {
        for (u32 i = 0; i < args.ring_units; ++i) {
            for (int half = 0; half < HALVES; ++half) {
                if (cursor.valid()) block.ring.template fetch<false, true, List::half_bits()>(cursor, half, lane);
                block.ring.commit();
            }
            block.ring.next_filled();
            cursor.advance(args, WARPS);
        }
    }

    Segment segment{};
    block.unit = begin + warp;
    for (u32 at = begin; at < end;) {
        while (segment.shard + 1 < args.shard_count && at >= args.shards[segment.shard + 1].first_unit) ++segment.shard;
        const ShardArgs& shard = args.shards[segment.shard];
        const u32 depth = shard.in_features / UNIT_IN;
        if (PLANES && block.planes.shard != segment.shard) {
            const u32 shard_end = shard.first_unit + shard.out_features / STRIP * depth;
            block.planes.fill(args, segment.shard, at, min(end, shard_end), warp, lane);
        }
        segment.strip = (at - shard.first_unit) / depth;
        segment.strip_begin = shard.first_unit + segment.strip * depth;
        segment.strip_end = segment.strip_begin + depth;
        const u32 segment_end = min(end, segment.strip_end);
        segment.complete = at == segment.strip_begin && segment_end == segment.strip_end;
        dispatch<PLANES>(List{}, shard.kind, block, segment, segment_end);
        at = segment_end;
    }
}

// Ends the tiles that several clusters have multiplied parts of: adds the parts in their order in k, then all that follows.
// The compiler's caller defines
//   INSTANCE_PARTS      how parts leave their sums: HalfParts, or IntParts of int8 products
//
// Grid (cut tiles × Hadamard blocks of a strip, groups of 64 tokens of a tile). Threads have the sums that the threads of the
// GEMM had.
#include "prefill_epilogue.cuh"

using FinishShape = Shape<64, 1, 1>;

struct FinishBlock {
    const PrefillArgs& args;
    Staging& staging;  // shared
    int warp, lane, thread;

    __device__ __forceinline__ void sync() const { __syncthreads(); }
};

extern "C" __global__ void __launch_bounds__(PAIR_THREADS, 2) exl3_prefill_finish(const __grid_constant__ PrefillArgs args) {
    extern __shared__ __align__(16) u8 memory[];
    const u32 tile = blockIdx.x / args.strip_blocks, place = blockIdx.x % args.strip_blocks, token = blockIdx.y * FinishShape::TOKENS;
    const u32 depth = args.in_features / UNIT_IN, begin = tile * depth;
    PrefillSegment segment;
    segment.locate(args, args.whole_tiles + tile);
    const PrefillShard& shard = args.shards[segment.shard];
    const u32 strip = args.strip_blocks * segment.strip + place, row = segment.row_tile * args.tile_rows + token;
    let_next_start();
    wait_for_previous();
    u32 range = prefill_range_of_unit(args, begin);
    const u32 last = prefill_range_of_unit(args, begin + depth - 1);
    if (strip >= shard.out_features / STRIP || row >= args.rows || range == last) return;  // one range has ended its tile itself
    FinishBlock block{args, *reinterpret_cast<Staging*>(memory), int(threadIdx.x / 32), int(threadIdx.x & 31), int(threadIdx.x)};
    fetch_scales(args, block.staging, segment.shard, strip, row, FinishShape::TOKENS, threadIdx.x, PAIR_THREADS);
    constexpr u32 steps = FinishShape::TOKENS / 16;
    using Parts = INSTANCE_PARTS;
    constexpr u32 vectors = Parts::VECTORS;
    const auto load = [&](uint4(&part)[steps][vectors], u32 of) {
        const uint4* from = prefill_partials<Parts>(args, of, begin, place) + token / 16 * vectors * PAIR_THREADS + threadIdx.x;
#pragma unroll
        for (u32 i = 0; i < steps; ++i)
#pragma unroll
            for (u32 j = 0; j < vectors; ++j) part[i][j] = __ldcg(from + (vectors * i + j) * PAIR_THREADS);
    };
    Parts::Sum added[FinishShape::TOKENS / 2] = {};
    uint4 part[steps][vectors], next[steps][vectors];  // one is on its way while the other is added
    load(part, range);
    for (; range <= last; ++range) {
        if (range < last) load(next, range + 1);
#pragma unroll
        for (u32 i = 0; i < steps; ++i) {
            Parts::add(added + 8 * i, part[i]);
#pragma unroll
            for (u32 j = 0; j < vectors; ++j) part[i][j] = next[i][j];
        }
    }
    float sums[FinishShape::TOKENS / 2];
#pragma unroll
    for (int i = 0; i < FinishShape::TOKENS / 2; ++i) sums[i] = Parts::whole(added[i]);
    asm volatile("cp.async.wait_all;" ::: "memory");
    finish_rows<FinishShape>(sums, block, shard, strip, row, min(u32(FinishShape::TOKENS), args.rows - row));
}

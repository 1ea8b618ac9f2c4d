// Split-K reduction as a launch of its own: adds the partial sums of a tile in the order of k, then runs its epilogue.
// The compiler's caller defines
//   INSTANCE_PARTIALS      how partial sums are stored: HalfPartials, or IntPartials of int8 products
//
// Grid (split tiles × Hadamard blocks of an n tile, groups of 64 tokens of a tile). Threads have the sums that the threads of the
// GEMM had.
#include "base/cp_async.cuh"
#include "prefill/epilogue.cuh"

using FinishShape = Shape<64, 1, 1>;

struct FinishBlock {
    const PrefillArgs& args;
    Staging& staging;  // shared
    int warp, lane, thread;

    __device__ __forceinline__ void sync() const { __syncthreads(); }
};

extern "C" __global__ void __launch_bounds__(PAIR_THREADS, 2) exl3_prefill_finish(const __grid_constant__ PrefillArgs args) {
    extern __shared__ __align__(16) u8 memory[];
    const u32 tile = blockIdx.x / args.n_blocks, place = blockIdx.x % args.n_blocks, token = blockIdx.y * FinishShape::TOKENS;
    const u32 depth = args.in_features / BLOCK_K, begin = tile * depth;
    PrefillWorkTile work;
    work.locate(args, args.whole_tiles + tile);
    const PrefillShard& shard = args.shards[work.shard];
    const u32 n_block = args.n_blocks * work.n_tile + place, row = work.row_tile * args.tile_rows + token;
    launch_dependent_grids();
    wait_on_dependent_grids();
    u32 range = range_of_k_block(args, begin);
    const u32 last = range_of_k_block(args, begin + depth - 1);
    if (n_block >= shard.out_features / HADAMARD_SIZE || row >= args.rows || range == last) return;  // one range has finished its tile itself
    FinishBlock block{args, *reinterpret_cast<Staging*>(memory), int(threadIdx.x / 32), int(threadIdx.x & 31), int(threadIdx.x)};
    fetch_scales(args, block.staging, work.shard, n_block, row, FinishShape::TOKENS, threadIdx.x, PAIR_THREADS);
    constexpr u32 steps = FinishShape::TOKENS / 16;
    using Partials = INSTANCE_PARTIALS;
    constexpr u32 vectors = Partials::VECTORS;
    const auto load = [&](uint4(&split)[steps][vectors], u32 of) {
        const uint4* from = prefill_partials<Partials>(args, of, begin, place) + token / 16 * vectors * PAIR_THREADS + threadIdx.x;
#pragma unroll
        for (u32 i = 0; i < steps; ++i)
#pragma unroll
            for (u32 j = 0; j < vectors; ++j) split[i][j] = __ldcg(from + (vectors * i + j) * PAIR_THREADS);
    };
    Partials::Sum added[FinishShape::TOKENS / 2] = {};
    uint4 split[steps][vectors], next[steps][vectors];  // one is on its way while the other is added
    load(split, range);
    for (; range <= last; ++range) {
        if (range < last) load(next, range + 1);
#pragma unroll
        for (u32 i = 0; i < steps; ++i) {
            Partials::add(added + 8 * i, split[i]);
#pragma unroll
            for (u32 j = 0; j < vectors; ++j) split[i][j] = next[i][j];
        }
    }
    float sums[FinishShape::TOKENS / 2];
#pragma unroll
    for (int i = 0; i < FinishShape::TOKENS / 2; ++i) sums[i] = Partials::whole(added[i]);
    cp_async_wait_all();
    finish_rows<FinishShape>(sums, block, shard, n_block, row, min(u32(FinishShape::TOKENS), args.rows - row));
}

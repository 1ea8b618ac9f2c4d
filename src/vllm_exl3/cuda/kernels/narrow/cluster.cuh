// The end of an n tile whose blocks form a cluster.
//
// Sums go straight to the shared memory of the block that finishes them, as [task of that block][block that they come from][channel];
// a task is a token's Hadamard block. No memory fence, no counter, no trip to the L2.
#pragma once
#include "base/barrier.cuh"
#include "narrow/partials.cuh"

#if __CUDA_ARCH__ >= 900
struct ClusterTasks {
    u32 splits, shift, blocks;  // blocks of the cluster, log2 of those that finish tasks, Hadamard blocks of the n tile

    template <int J>
    static __device__ __forceinline__ ClusterTasks of(const NarrowArgs& args, const NTile& n_tile) {
        const u32 channels = min(WARPS * J * 16, args.shards[n_tile.shard].out_features - n_tile.channel);
        return {args.splits, 31u - __clz(args.splits), channels / HADAMARD_SIZE};
    }
    __device__ __forceinline__ u32 owner(u32 task) const { return task & ((1u << shift) - 1); }
    __device__ __forceinline__ u32 place(u32 task, u32 block) const { return ((task >> shift) * splits + block) * (4 * HADAMARD_SIZE); }
};

template <class K, int J>
__device__ __forceinline__ void send_partial(const NarrowArgs& args, const Totals<K> (&totals)[J], const NTile& n_tile, u32 exchange, u32 warp,
                                           int lane) {
    using Tokens = LaneTokens<K>;
    const ClusterTasks tasks = ClusterTasks::of<J>(args, n_tile);
    const u32 rows = min(static_cast<u32>(K::tile_rows), args.rows - blockIdx.y * K::tile_rows);
    const u32 first = warp * J * 16, rank = cluster_rank();
#pragma unroll
    for (int group = 0; group < K::columns; ++group) {
#pragma unroll
        for (int i = 0; i < Tokens::count; ++i) {
            const u32 token = Tokens::token_of(group, i, lane);
            if (token >= rows) continue;
            const u32 task = token * tasks.blocks + first / HADAMARD_SIZE;
            const u32 to = map_to_rank(exchange + tasks.place(task, rank) + (first % HADAMARD_SIZE + (lane >> 2)) * 4, tasks.owner(task));
#pragma unroll
            for (int tile = 0; tile < J; ++tile) {
                store_remote(to + 64 * tile, totals[tile][group][0][i]);
                store_remote(to + 64 * tile + 32, totals[tile][group][1][i]);
            }
        }
    }
}

// Tasks that a warp reduces at once: all of their loads are issued beforehand.
constexpr int TASKS_AT_ONCE = 2;

template <int J, int TILE_ROWS>
__device__ __forceinline__ void finish_cluster(const NarrowArgs& args, const NTile& n_tile, u32 exchange, u32 warp, int lane) {
    const NarrowShard& shard = args.shards[n_tile.shard];
    const ClusterTasks tasks = ClusterTasks::of<J>(args, n_tile);
    const u32 rows = min(static_cast<u32>(TILE_ROWS), args.rows - blockIdx.y * TILE_ROWS), rank = cluster_rank();
    const u32 count = rows * tasks.blocks, step = WARPS << tasks.shift;
    u32 task = warp << tasks.shift | rank, token[TASKS_AT_ONCE], column[TASKS_AT_ONCE];
    uint2 svh[TASKS_AT_ONCE];
    const auto prepare = [&] {
#pragma unroll
        for (int i = 0; i < TASKS_AT_ONCE; ++i) {
            const u32 index = min(task + i * step, count - 1);
            token[i] = quotient(index, tasks.blocks), column[i] = n_tile.channel + (index - token[i] * tasks.blocks) * HADAMARD_SIZE + 4 * lane;
            svh[i] = *reinterpret_cast<const uint2*>(shard.svh + column[i]);
        }
    };
    const bool finishes = rank < 1u << tasks.shift;
    if (finishes) prepare();
    cluster_sync();
    if (!finishes) return;
    while (task < count) {
        float sums[TASKS_AT_ONCE][4] = {};
        for (u32 block = 0; block < tasks.splits; ++block) {
#pragma unroll
            for (int i = 0; i < TASKS_AT_ONCE; ++i) {
                u32 part[4];
                SharedWords{exchange + tasks.place(task + i * step < count ? task + i * step : task, block) + 16 * lane}.run(part, 0);
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][j] += __uint_as_float(part[j]);
            }
        }
#pragma unroll
        for (int i = 0; i < TASKS_AT_ONCE; ++i)
            if (task + i * step < count)
                store_token(args, shard, {sums[i][0], sums[i][1], sums[i][2], sums[i][3]}, 1.0f, svh[i], column[i],
                            blockIdx.y * TILE_ROWS + token[i], lane);
        task += TASKS_AT_ONCE * step;
        if (task < count) prepare();
    }
}
#endif

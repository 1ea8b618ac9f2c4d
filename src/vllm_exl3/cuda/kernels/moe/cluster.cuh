// The grouped GEMM for the largest row blocks: a pair of warpgroups has a multiprocessor's registers, and two thread blocks
// that multiply neighbouring Hadamard blocks share one copy of the activations, each bringing a part of it to both. A warp of its
// own fetches.
#pragma once
#include "moe/wide.cuh"

constexpr int CLUSTER = INSTANCE_CLUSTER, PRODUCER_THREADS = 128;  // blocks of a cluster; threads of the fetching warpgroup

// One warp's state, as MoePair.
template <class List>
struct ClusterPair {
    static constexpr int K_BLOCKS = 1;
    const MoeArgs& args;
    const MoeStage& stage;
    const List& list;
    MoePipeline pipeline;
    u32 rank;
    int warp, lane;

    __device__ __forceinline__ u32 n_block(u32 work_tile) const { return list.n_block(work_tile) + rank; }
    // In a cluster a shared address names its block above bit 24, where a descriptor has other things.
    __device__ __forceinline__ u32 activations() const { return (pipeline.address + 4 * args.weight_pitch) & 0x3ffff; }
    __device__ __forceinline__ void release(u32 empty) const {
        if (lane < CLUSTER) mbarrier_arrive_remote(empty, lane);
    }
    __device__ __forceinline__ void wait_for_stage() const { mbarrier_wait(pipeline.full(), pipeline.phase); }
};

// Fetches every k block of the cluster's work tiles. One warp.
template <class List>
__device__ __forceinline__ void produce(const MoeArgs& args, const MoeStage& stage, const List& list, u32 rank) {
    WideCursor<1> cursor;
    cursor.work_tile = blockIdx.x / CLUSTER, cursor.filled = 0, cursor.phase = 1;  // the first round finds empty slots
    u32 target = MoePipeline::base();
    for (cursor.seek(args, stage, list, rank); cursor.work_tile < list.work_tiles;) {
        const u32 barrier = MoePipeline::memory() + 8 * cursor.filled;
        mbarrier_wait(barrier + 8 * args.pipeline_stages, cursor.phase);
        if (elect_one()) {
            // Whole groups of rows; a part may have none.
            const u32 part = (cursor.activation_bytes / GROUP_BYTES + CLUSTER - 1) / CLUSTER * GROUP_BYTES;
            const u32 offset = min(rank * part, cursor.activation_bytes), bytes = min(part, cursor.activation_bytes - offset);
            mbarrier_arrive_expect_tx(barrier, cursor.stage_bytes());
            cursor.copy_weights(args, target, barrier);
            if (bytes)
                bulk_copy_multicast(target + 4 * args.weight_pitch + offset, cursor.activations + offset, bytes, barrier, (1 << CLUSTER) - 1);
        }
        __syncwarp();
        if (!cursor.advance()) cursor.work_tile += gridDim.x / CLUSTER, cursor.seek(args, stage, list, rank);
        target += args.stage_stride;
        if (++cursor.filled == args.pipeline_stages) cursor.filled = 0, cursor.phase ^= 1, target = MoePipeline::base();
    }
}

template <int ROWS, int LEAST, int STEP, class List>
__device__ __forceinline__ void moe_cluster(const MoeArgs& args) {
    const MoeStage& stage = args.stages[args.stage];
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const u32 rank = cluster_rank();
    init_pipeline(args.pipeline_stages, PAIR_WARPS * CLUSTER);
    cluster_sync();
    wait_on_dependent_grids();
    launch_dependent_grids();
    const WorkList<List::mixed> list(args, stage, CLUSTER);
    if (warp < PRODUCER_THREADS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp == 0) produce(args, stage, list, rank);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        ClusterPair<WorkList<List::mixed>> pair{args, stage, list};
        pair.warp = warp - PRODUCER_THREADS / 32, pair.lane = lane, pair.rank = rank, pair.pipeline.address = MoePipeline::base();
        for (u32 work_tile = blockIdx.x / CLUSTER; work_tile < list.work_tiles; work_tile += gridDim.x / CLUSTER)
            run_work_tile<List, ROWS, LEAST, STEP>(pair, work_tile, list.rows(work_tile).rows);
    }
    // No block leaves while another may still write to its shared memory.
    __syncwarp();
    cluster_sync();
}

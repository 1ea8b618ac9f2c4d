// The grouped GEMM for the largest row blocks: a pair of warpgroups has a multiprocessor's registers, and two thread blocks
// that multiply neighbouring Hadamard blocks share one copy of the activations, each bringing a part of it to both. A warp of its
// own fetches.
#pragma once
#include "moe_wide.cuh"

constexpr int CLUSTER = INSTANCE_CLUSTER, FETCHERS = 128;  // blocks of a cluster; threads of the fetching warpgroup

// One warp's state, as MoePair.
template <class List>
struct ClusterPair {
    static constexpr int UNITS = 1;
    const MoeArgs& args;
    const MoeStage& stage;
    const List& list;
    MoeRing ring;
    u32 rank;
    int warp, lane;

    __device__ __forceinline__ u32 strip(u32 item) const { return list.strip(item) + rank; }
    // In a cluster a shared address names its block above bit 24, where a descriptor has other things.
    __device__ __forceinline__ u32 activations() const { return (ring.at + 4 * args.weight_pitch) & 0x3ffff; }
    __device__ __forceinline__ void release(u32 empty) const {
        if (lane < CLUSTER) mbarrier_arrive_at(empty, lane);
    }
    __device__ __forceinline__ void wait_for_slot() const { mbarrier_wait(ring.full(), ring.phase); }
};

// Fetches every unit of the cluster's items. One warp.
template <class List>
__device__ __forceinline__ void fetch_units(const MoeArgs& args, const MoeStage& stage, const List& list, u32 rank) {
    WideCursor<1> cursor;
    cursor.item = blockIdx.x / CLUSTER, cursor.filled = 0, cursor.phase = 1;  // the first round finds empty slots
    u32 target = MoeRing::base();
    for (cursor.seek(args, stage, list, rank); cursor.item < list.items;) {
        const u32 barrier = MoeRing::memory() + 8 * cursor.filled;
        mbarrier_wait(barrier + 8 * args.ring_stages, cursor.phase);
        if (one_lane()) {
            // Whole groups of rows; a part may have none.
            const u32 part = (cursor.activation_bytes / GROUP_BYTES + CLUSTER - 1) / CLUSTER * GROUP_BYTES;
            const u32 offset = min(rank * part, cursor.activation_bytes), bytes = min(part, cursor.activation_bytes - offset);
            mbarrier_expect(barrier, cursor.slot_bytes());
            cursor.copy_weights(args, target, barrier);
            if (bytes)
                copy_to_cluster(target + 4 * args.weight_pitch + offset, cursor.activations + offset, bytes, barrier, (1 << CLUSTER) - 1);
        }
        __syncwarp();
        if (!cursor.advance()) cursor.item += gridDim.x / CLUSTER, cursor.seek(args, stage, list, rank);
        target += args.ring_stride;
        if (++cursor.filled == args.ring_stages) cursor.filled = 0, cursor.phase ^= 1, target = MoeRing::base();
    }
}

template <int ROWS, int LEAST, int STEP, class List>
__device__ __forceinline__ void moe_cluster(const MoeArgs& args) {
    const MoeStage& stage = args.stages[args.stage];
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const u32 rank = rank_in_cluster();
    init_ring(args.ring_stages, PAIR_WARPS * CLUSTER);
    sync_cluster();
    wait_for_previous();
    let_next_start();
    const WorkList<List::mixed> list(args, stage, CLUSTER);
    if (warp < FETCHERS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp == 0) fetch_units(args, stage, list, rank);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        ClusterPair<WorkList<List::mixed>> pair{args, stage, list};
        pair.warp = warp - FETCHERS / 32, pair.lane = lane, pair.rank = rank, pair.ring.at = MoeRing::base();
        for (u32 item = blockIdx.x / CLUSTER; item < list.items; item += gridDim.x / CLUSTER)
            run_item<List, ROWS, LEAST, STEP>(pair, item, list.rows(item).rows);
    }
    // No block leaves while another may still write to its shared memory.
    __syncwarp();
    sync_cluster();
}

// One thread block of the narrow kernel: its pipeline of weights, the activations that it caches, and where its sums go.
#pragma once
#include "narrow/reduction.cuh"
#include "narrow/input.cuh"
#include "narrow/pipeline.cuh"
#include "narrow/cluster.cuh"

// The launch's kinds of shards, and what shared memory holds for the largest of them.
template <class... Ks>
struct Kinds {
    static constexpr int tile_rows = (Ks::tile_rows, ...);  // the same for all
    static constexpr bool single = sizeof...(Ks) == 1;  // more kinds leave fewer registers
    // 2·K of all kinds, or 0 where they differ.
    static constexpr int half_bits() {
        int least = 1 << 30, most = 0;
        ((least = Ks::half_bits < least ? Ks::half_bits : least, most = Ks::half_bits > most ? Ks::half_bits : most), ...);
        return least == most ? most : 0;
    }
    static constexpr u32 stage_bytes(int tiles) {
        u32 most = 0;
        ((most = max_of(most, K_TILES * (16 * tiles * Ks::half_bits + ROW_PAD))), ...);
        return most;
    }

private:
    static constexpr u32 max_of(u32 a, u32 b) { return a > b ? a : b; }
};

// How far the activations of a k block are after `begin_caching`: cached, in flight since the k blocks before, issued now, or only
// the first of several rounds of them, with the rest of the pipeline to follow.
enum LoadState { CACHED, IN_FLIGHT, ISSUED, FIRST_ISSUED };

// True where a warp that rotates in several rounds issues the rest of its pipeline after the input of the last. As measured.
template <class K, class List> constexpr bool DEFERS_WEIGHTS = List::single && (K::arithmetic != HALF || (K::byte_sums && K::tile_rows > 8));

// One block's state through its n tiles.
template <int J, int STAGES, bool CLUSTER, class List>
struct NarrowBlock {
    static constexpr bool single = List::single;
    static constexpr bool clustered = CLUSTER;  // the blocks of an n tile form a cluster
    static constexpr u32 stage_bytes = List::stage_bytes(J), pipeline_bytes = STAGES * stage_bytes;
    const NarrowArgs& args;
    TileReduction<J, List::tile_rows> reduction;
    u8* records;                    // cached k blocks
    u32 exchange;                   // shared address: sums of the cluster's blocks
    u32 cached_begin, cached_end, buffer; // which, and in which half of the memory for them
    u32 next_end, end;              // of the k blocks fetched after them; of the block's range
    u32 pipeline_end, stage;             // shared addresses: behind the warp's pipeline, of the stage being read
    Cursor<J, List::half_bits()> cursor;
    u32 warp;
    int lane;

    __device__ __forceinline__ void start(u32 pipeline, u32 begin, u32 range_end) {
        end = range_end, cached_begin = cached_end = next_end = begin, buffer = 0;
        cursor.k_block = begin, cursor.end = end, cursor.left = 0;
        cursor.seek(args, warp, lane);
        pipeline_end = pipeline + pipeline_bytes, stage = pipeline;
        fetch_stages(EARLY_STAGES);
        stage = pipeline;
    }
    __device__ __forceinline__ void fetch_stages(u32 stages) {
#pragma unroll 1
        for (; stages; --stages, stage += stage_bytes) cursor.fetch(args, stage, warp, lane);
    }
    __device__ __forceinline__ void next_stage() {
        __syncwarp();
        cursor.fetch(args, stage, warp, lane);
        stage += stage_bytes;
        if (stage == pipeline_end) stage -= pipeline_bytes;
    }
    // K blocks of a warp that has no columns.
    __device__ __forceinline__ void skip(u32 k_blocks) {
#pragma unroll 1
        for (; k_blocks; --k_blocks) next_stage();
    }
    // Makes sure of the activations of a k block and, as far as there is room, those after it, in two steps: what memory has is issued
    // for, and waited for. Of what a launch before rotated, the part after that is fetched behind the arithmetic. What other kernels
    // write is touched after this only. The first time most of a pipeline is issued behind the activations, which would come after it.
    template <class K>
    __device__ __forceinline__ LoadState begin_caching(RawOf<K>& raw, u32 k_block, const NarrowShard& shard) {
        if (k_block < cached_end) return CACHED;
        if (k_block < next_end) return IN_FLIGHT;
        next_end = min(k_block + args.cached_k_blocks, last_k_block(shard)), buffer = 0;
        if (args.records == nullptr) {
            const Rotations<K, WARPS> rotations(shared_address(records), args, shard, k_block, next_end, warp);
            Rotation at{};
            if (rotations.any()) {
                at = rotations.warp_wide ? rotations.rotation_of(args, rotations.first) : rotations.rotation(args, lane);
                if (rotations.warp_wide) load_scales_warp_wide(raw, shard, at, lane);
                else load_scales(raw, shard, at, lane);
            }
            wait_on_dependent_grids();
            if (rotations.any()) {
                if (rotations.warp_wide) load_input_warp_wide(raw, args, at, lane);
                else load_input(raw, args, at, rotations.whole, lane);
            }
            if (announces_arrival()) reduction.mark_missing(lane);
            // A block whose k blocks all fit its pipelines lets no warp issue more weights before all have issued input. As measured.
            if (K::half_bits <= 8 && rotations.warp_wide && !begun() && end - k_block <= STAGES) __syncthreads();
            if (DEFERS_WEIGHTS<K, List> && !begun() && rotations.more()) return FIRST_ISSUED;
        } else {
            wait_on_dependent_grids();
            if (begun()) __syncthreads();  // nobody reads the ones before any more
            fetch_k_blocks(shared_address(records), args, shard, k_block, next_end), cp_async_commit();
            if (announces_arrival()) reduction.mark_missing(lane);
        }
        if (!begun()) fill_pipeline();
        return ISSUED;
    }
    // True after the first activations were cached.
    __device__ __forceinline__ bool begun() const { return cached_begin != cached_end; }
    // True for the warp that announces the block's arrival: once, in two steps with a barrier between them.
    __device__ __forceinline__ bool announces_arrival() const { return !clustered && !begun() && warp == reduction.leader; }
    // Issues the loads of the pipeline that `start` did not.
    __device__ __forceinline__ void fill_pipeline() {
        stage += EARLY_STAGES * stage_bytes;
        fetch_stages(STAGES - EARLY_STAGES);
        stage -= pipeline_bytes;
    }
    // Until the weights of the stage being read have arrived.
    template <class K>
    __device__ __forceinline__ void wait_for_stage(LoadState state) const {
        if (DEFERS_WEIGHTS<K, List> && state == FIRST_ISSUED) wait_for_copies<EARLY_STAGES - 1>();
        else wait_for_copies<STAGES - 1>();
    }
    template <class K>
    __device__ __forceinline__ void end_caching(LoadState state, RawOf<K>& raw, u32 k_block, const NarrowShard& shard) {
        if (state == CACHED) return;
        const u32 last = last_k_block(shard);
        if (state == IN_FLIGHT) {
            buffer ^= args.cache_buffers - 1;
            wait_for_copies<STAGES - 1>();  // STAGES fetches of weights have followed
        } else if (args.records == nullptr) {
            if (begun()) __syncthreads();  // nobody reads the ones before any more
            Rotations<K, WARPS> rotations(shared_address(records), args, shard, rematerialize(k_block), next_end, warp);
            rotate_k_blocks(raw, rotations, args, shard, rematerialize(lane), [&] {
                if (DEFERS_WEIGHTS<K, List> && state == FIRST_ISSUED) fill_pipeline();
            });
        } else if (begun()) {
            wait_for_copies<0>();
        } else {
            wait_for_copies<STAGES - EARLY_STAGES>();
        }
        if constexpr (WARPGROUPS && K::arithmetic == HALF) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (announces_arrival()) reduction.count(args, lane);
        cached_begin = k_block, cached_end = next_end;
        if (args.cache_buffers > 1 && cached_end < last) {
            next_end = min(cached_end + args.cached_k_blocks, last);
            fetch_k_blocks(shared_address(records) + (buffer ^ 1) * args.cached_k_blocks * args.record_bytes, args, shard, cached_end, next_end);
        }
    }
    __device__ __forceinline__ u32 last_k_block(const NarrowShard& shard) const {
        return min(end, shard.end_k_block);
    }
    // Shared address of a cached k block's record.
    __device__ __forceinline__ u32 record_of(u32 k_block) const {
        return shared_address(records) + (buffer * args.cached_k_blocks + k_block - cached_begin) * args.record_bytes;
    }
};

// Hands a warp's partial sums to the block that reduces the n tile.
template <class K, int J, class Block>
__device__ __forceinline__ void hand_over_partial(Block& block, const Totals<K> (&totals)[J], const NTile& n_tile, bool columns) {
#if __CUDA_ARCH__ >= 900
    if constexpr (Block::clustered) {
        cluster_wait();
        if (columns) send_partial<K, J>(block.args, totals, n_tile, block.exchange, block.warp, block.lane);
        return;
    }
#endif
    if (columns) store_partial<K, J>(block.args, totals, n_tile, block.warp, rematerialize(block.lane));
}

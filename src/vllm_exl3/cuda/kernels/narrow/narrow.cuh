// The trellis GEMM for up to 16 tokens a tile, on Hopper 32: y = ((x·suh) H W H)·svh + bias, one launch a fused linear, or two.
//
// A warp multiplies J tile columns of its own; all warps of a block take the same k, so no sum crosses warps. Weights stream
// through each warp's pipeline; they are fetched before the kernel ahead has finished, since nothing ever writes them. Then the block
// rotates the activations of its own k blocks (narrow/activations.cuh), or loads what a launch before it rotated, and multiplies.
#pragma once
#include "narrow/block.cuh"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "narrow/wgmma_loop.cuh"
#endif

// A warp's part of one k block. DECODED: its first step is in `a`; else decoding for one product runs beside the one before.
template <class K, int J, bool DECODED>
__device__ __forceinline__ void multiply_k_block(Totals<K> (&totals)[J], Step<K>& a, u32 stage, u32 record, const LanePlaces<K>& places, int lane) {
    LaneTokens<K> tokens;
    tokens.load(record, places);
    KBlockSum<K> sums[J][K::columns][4];
    u32 words[2][K::Window::words];
    const auto load_step = [&](int step) {
        load_words<K::half_bits>(words[step % 2], SharedWords{stage + step_at<K, J>(step, lane)}, lane);
    };
    if (!DECODED) load_step(0);
#pragma unroll
    for (int k_half = 0; k_half < 2; ++k_half) {
        Operand<K> operand(record + places.operand + k_half * Record<K::arithmetic, K::tile_rows>::k_half_bytes);
#pragma unroll
        for (int tile = 0; tile < J; ++tile) {
            const int step = k_half * J + tile;
            if (step + 1 < 2 * J) load_step(step + 1);
            if (DECODED && step == 0) multiply_step<K>(sums[0], tokens.start, a, operand);
            else multiply_words<K>(sums[tile], k_half == 0 ? tokens.start : sums[tile], words[step % 2], operand);
            if (k_half == 1) add_k_block<K>(totals[tile], sums[tile], tokens);
        }
    }
}

// The k blocks [begin, end) of one n tile.
template <class K, int J, int STAGES, bool CLUSTER, class List>
__device__ __forceinline__ void multiply_n_tile(NarrowBlock<J, STAGES, CLUSTER, List>& block, const NTile& n_tile, u32 begin, u32 end) {
    const NarrowArgs& args = block.args;
    const NarrowShard& shard = args.shards[n_tile.shard];
    const u32 rows = min(static_cast<u32>(K::tile_rows), args.rows - blockIdx.y * K::tile_rows);
    const LanePlaces<K> places(block.lane, rows);
    const bool columns = n_tile.channel + block.warp * J * 16 < shard.out_features;
    Totals<K> totals[J] = {};
    for (u32 k_block = begin; k_block < end;) {
        Step<K> a;  // decoded while activations are on their way, where registers are known to suffice
        RawOf<K> raw;
        const LoadState state = block.template begin_caching<K>(raw, k_block, shard);
        const auto decode_first = [&] {
            if (!columns) return;
            block.template wait_for_stage<K>(state);
            decode_step<K>(a, block.stage + step_at<K, J>(0, block.lane), block.lane);
        };
        if (WARPGROUPS && List::single) decode_first();
        block.template end_caching<K>(state, raw, k_block, shard);
        if (WARPGROUPS && !List::single) decode_first();
        const u32 stop = min(end, block.cached_end);
        if (columns) {
            u32 record = block.record_of(k_block);
            if (!WARPGROUPS) wait_for_copies<STAGES - 1>();
            multiply_k_block<K, J, WARPGROUPS>(totals, a, block.stage, record, places, block.lane);
            block.next_stage();
            for (u32 left = stop - k_block - 1; left; --left) {
                wait_for_copies<STAGES - 1>();
                record += args.record_bytes;
                multiply_k_block<K, J, false>(totals, a, block.stage, record, places, block.lane);
                block.next_stage();
            }
        } else {
            block.skip(stop - k_block);
        }
        k_block = stop;
    }
    hand_over_partial<K, J>(block, totals, n_tile, columns);
}

template <class K, int J, int STAGES, bool CLUSTER, class List>
__device__ __forceinline__ void multiply_any(NarrowBlock<J, STAGES, CLUSTER, List>& block, const NTile& n_tile, u32 begin, u32 end) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (K::arithmetic == HALF) multiply_n_tile_wgmma<K, J, STAGES>(block, n_tile, begin, end);
    else
#endif
        multiply_n_tile<K>(block, n_tile, begin, end);
}

template <int J, int STAGES, bool CLUSTER, class List, class... Ks>
__device__ __forceinline__ void dispatch(Kinds<Ks...>, u32 kind, NarrowBlock<J, STAGES, CLUSTER, List>& block, const NTile& n_tile, u32 begin, u32 end) {
    u32 index = 0;
    if constexpr (sizeof...(Ks) == 1) (multiply_any<Ks>(block, n_tile, begin, end), ...);
    else ((index++ == kind ? multiply_any<Ks>(block, n_tile, begin, end) : void()), ...);
}

template <int J, int STAGES, bool CLUSTER, class List>
__device__ __forceinline__ void narrow(const NarrowArgs& args) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ SharedTile shared_tiles[2];
    __shared__ BlockPartials partials;
    using Block = NarrowBlock<J, STAGES, CLUSTER, List>;
    // The warp's index is made uniform, so that everything derived from it is computed once a warp.
    const u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const auto [begin, end] = Range(args, blockIdx.x);

    // Shared memory: the warps' pipelines, then the cached k blocks' records.
    Block block{args, {shared_tiles, partials}};
    const int lane = threadIdx.x & 31;
    block.warp = warp, block.lane = lane;
    block.records = memory + WARPS * Block::pipeline_bytes;
    if constexpr (CLUSTER) block.exchange = shared_address(block.records) + args.cache_buffers * args.cached_k_blocks * args.record_bytes;

#if __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER) cluster_arrive_relaxed();
#endif
    // Weights never change: they are fetched before the kernel ahead has finished. All else waits for it, in `keep`.
    block.start(shared_address(memory) + warp * Block::pipeline_bytes, begin, end);
    launch_dependent_grids();
    if (!CLUSTER && warp == block.reduction.leader) block.reduction.prepare(args, lane);

    NTile n_tile{};
    for (u32 at = begin; at < end;) {
        if (WARPGROUPS) n_tile.shard = 0;  // looked for again: no register is left to keep it
        n_tile.find(args, at, WARPS * J * 16);
        const u32 work_end = min(end, n_tile.end_k_block);
        dispatch(List{}, args.shards[n_tile.shard].kind, block, n_tile, at, work_end);
#if __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) {  // the range is a part of one n tile
            finish_cluster<J, List::tile_rows>(args, n_tile, block.exchange, warp, lane);
            return;
        }
#endif
        if (!WARPGROUPS) n_tile = {}, n_tile.find(args, rematerialize(work_end) - 1, WARPS * J * 16);  // the same there
        block.reduction.add(args, n_tile, warp, rematerialize(lane));
        at = work_end;
    }
    block.reduction.finish(args, warp, rematerialize(lane));
}

template <class K>
__device__ __forceinline__ void rotate_k_block(u32 record, const NarrowArgs& args, const NarrowShard& shard, u32 k_block, u32 warp, int lane) {
    Rotations<K, ROTATE_WARPS> rotations(record, args, shard, k_block, k_block + 1, warp);
    if (!rotations.any()) return;
    RawOf<K> raw;
    const Rotation at = rotations.rotation(args, lane);
    load_scales(raw, shard, at, lane), load_input(raw, args, at, rotations.whole, lane);
    rotate_k_blocks(raw, rotations, args, shard, lane, [] {});
}

// One record of every token of a row tile; grid (records, row tiles).
template <class... Ks>
__device__ __forceinline__ void rotate(Kinds<Ks...> kinds, const NarrowArgs& args) {
    extern __shared__ __align__(128) u8 memory[];  // a record
    const u32 warp = threadIdx.x / 32;
    u32 index = 0;
    launch_dependent_grids();
    wait_on_dependent_grids();
    if (gridDim.y > 1 && args.counters != nullptr)  // the counters of several row tiles are scratch that nobody has cleared
        for (u32 i = (blockIdx.y * gridDim.x + blockIdx.x) * ROTATE_THREADS + threadIdx.x; i < args.n_tiles * gridDim.y;
             i += gridDim.x * gridDim.y * ROTATE_THREADS)
            args.counters[i] = 0;
    while (index + 1 < args.shard_count && blockIdx.x >= args.shards[index + 1].first_record) ++index;
    const NarrowShard& shard = args.shards[index];
    const u32 k_block = shard.first_k_block + blockIdx.x - shard.first_record;
    u32 number = 0;
    ((number++ == shard.kind ? rotate_k_block<Ks>(shared_address(memory), args, shard, k_block, warp, threadIdx.x & 31) : void()), ...);
    __syncthreads();
    const u32 chunks = args.record_bytes / 16;
    uint4* target = const_cast<uint4*>(args.records) + (static_cast<u64>(blockIdx.y) * args.total_records + blockIdx.x) * chunks;
    for (u32 chunk = threadIdx.x; chunk < chunks; chunk += ROTATE_THREADS) target[chunk] = reinterpret_cast<const uint4*>(memory)[chunk];
}

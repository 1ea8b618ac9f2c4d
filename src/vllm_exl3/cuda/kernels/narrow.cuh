// The trellis GEMM for up to 16 tokens a tile, on Hopper 32: y = ((x·suh) H W H)·svh + bias, one launch a fused linear, or two.
//
// A warp multiplies J tile columns of its own; all warps of a block take the same k, so no sum crosses warps. Weights stream
// through each warp's ring; they are fetched before the kernel ahead has finished, since nothing ever writes them. Then the block
// rotates the activations of its own items (narrow_activations.cuh), or loads what a launch before it rotated, and multiplies.
#pragma once
#include "narrow_block.cuh"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "narrow_warpgroup.cuh"
#endif

// A warp's part of one item. DECODED: its first step is in `a`; else decoding for one product runs beside the one before.
template <class K, int J, bool DECODED>
__device__ __forceinline__ void multiply_item(Totals<K> (&totals)[J], Step<K>& a, u32 slot, u32 record, const LanePlaces<K>& places, int lane) {
    LaneTokens<K> tokens;
    tokens.load(record, places);
    ItemSum<K> sums[J][K::columns][4];
    u32 words[2][K::Window::words];
    const auto load_step = [&](int step) {
        load_words<K::half_bits>(words[step % 2], SharedWords{slot + step_at<K, J>(step, lane)}, lane);
    };
    if (!DECODED) load_step(0);
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
        Operand<K> operand(record + places.operand + unit * Record<K::arithmetic, K::tile_rows>::unit_bytes);
#pragma unroll
        for (int tile = 0; tile < J; ++tile) {
            const int step = unit * J + tile;
            if (step + 1 < 2 * J) load_step(step + 1);
            if (DECODED && step == 0) multiply_step<K>(sums[0], tokens.start, a, operand);
            else multiply_words<K>(sums[tile], unit == 0 ? tokens.start : sums[tile], words[step % 2], operand);
            if (unit == 1) add_item<K>(totals[tile], sums[tile], tokens);
        }
    }
}

// The items [begin, end) of one strip.
template <class K, int J, int RING, bool CLUSTER, class List>
__device__ __forceinline__ void multiply_strip(NarrowBlock<J, RING, CLUSTER, List>& block, const Strip& strip, u32 begin, u32 end) {
    const NarrowArgs& args = block.args;
    const NarrowShard& shard = args.shards[strip.shard];
    const u32 rows = min(static_cast<u32>(K::tile_rows), args.rows - blockIdx.y * K::tile_rows);
    const LanePlaces<K> places(block.lane, rows);
    const bool columns = strip.channel + block.warp * J * 16 < shard.out_features;
    Totals<K> totals[J] = {};
    for (u32 item = begin; item < end;) {
        Step<K> a;  // decoded while activations are on their way, where registers are known to suffice
        RawOf<K> raw;
        const Asked asked = block.template begin_keeping<K>(raw, item, shard);
        const auto decode_first = [&] {
            if (!columns) return;
            block.template wait_for_slot<K>(asked);
            decode_step<K>(a, block.slot + step_at<K, J>(0, block.lane), block.lane);
        };
        if (WARPGROUPS && List::single) decode_first();
        block.template end_keeping<K>(asked, raw, item, shard);
        if (WARPGROUPS && !List::single) decode_first();
        const u32 stop = min(end, block.kept_end);
        if (columns) {
            u32 record = block.record_of(item);
            if (!WARPGROUPS) wait_for_fetch<RING - 1>();
            multiply_item<K, J, WARPGROUPS>(totals, a, block.slot, record, places, block.lane);
            block.next_slot();
            for (u32 left = stop - item - 1; left; --left) {
                wait_for_fetch<RING - 1>();
                record += args.record_bytes;
                multiply_item<K, J, false>(totals, a, block.slot, record, places, block.lane);
                block.next_slot();
            }
        } else {
            block.skip(stop - item);
        }
        item = stop;
    }
    end_piece<K, J>(block, totals, strip, columns);
}

template <class K, int J, int RING, bool CLUSTER, class List>
__device__ __forceinline__ void multiply_any(NarrowBlock<J, RING, CLUSTER, List>& block, const Strip& strip, u32 begin, u32 end) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (K::arithmetic == HALF) multiply_strip_together<K, J, RING>(block, strip, begin, end);
    else
#endif
        multiply_strip<K>(block, strip, begin, end);
}

template <int J, int RING, bool CLUSTER, class List, class... Ks>
__device__ __forceinline__ void dispatch(Kinds<Ks...>, u32 kind, NarrowBlock<J, RING, CLUSTER, List>& block, const Strip& strip, u32 begin, u32 end) {
    u32 index = 0;
    if constexpr (sizeof...(Ks) == 1) (multiply_any<Ks>(block, strip, begin, end), ...);
    else ((index++ == kind ? multiply_any<Ks>(block, strip, begin, end) : void()), ...);
}

template <int J, int RING, bool CLUSTER, class List>
__device__ __forceinline__ void narrow(const NarrowArgs& args) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ SharedStrip ends[2];
    __shared__ BlockPieces pieces;
    using Block = NarrowBlock<J, RING, CLUSTER, List>;
    // The warp's index is made uniform, so that everything derived from it is computed once a warp.
    const u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const auto [begin, end] = Range(args, blockIdx.x);

    // Shared memory: the warps' rings, then the kept items' records.
    Block block{args, {ends, pieces}};
    const int lane = threadIdx.x & 31;
    block.warp = warp, block.lane = lane;
    block.records = memory + WARPS * Block::ring_bytes;
    if constexpr (CLUSTER) block.exchange = shared_address(block.records) + args.kept_halves * args.kept_items * args.record_bytes;

#if __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER) cluster_started();
#endif
    // Weights never change: they are fetched before the kernel ahead has finished. All else waits for it, in `keep`.
    block.start(shared_address(memory) + warp * Block::ring_bytes, begin, end);
    let_next_start();
    if (!CLUSTER && warp == block.ends.announcer) block.ends.prepare(args, lane);

    Strip strip{};
    for (u32 at = begin; at < end;) {
        if (WARPGROUPS) strip.shard = 0;  // looked for again: no register is left to keep it
        strip.find(args, at, WARPS * J * 16);
        const u32 piece_end = min(end, strip.end_item);
        dispatch(List{}, args.shards[strip.shard].kind, block, strip, at, piece_end);
#if __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) {  // the range is a part of one strip
            finish_together<J, List::tile_rows>(args, strip, block.exchange, warp, lane);
            return;
        }
#endif
        if (!WARPGROUPS) strip = {}, strip.find(args, computed_here(piece_end) - 1, WARPS * J * 16);  // the same there
        block.ends.add(args, strip, warp, computed_here(lane));
        at = piece_end;
    }
    block.ends.finish(args, warp, computed_here(lane));
}

template <class K>
__device__ __forceinline__ void rotate_item(u32 record, const NarrowArgs& args, const NarrowShard& shard, u32 item, u32 warp, int lane) {
    Rotations<K, ROTATE_WARPS> rotations(record, args, shard, item, item + 1, warp);
    if (!rotations.any()) return;
    RawOf<K> raw;
    const Rotation at = rotations.rotation(args, lane);
    load_scales(raw, shard, at, lane), load_input(raw, args, at, rotations.whole, lane);
    rotate_items(raw, rotations, args, shard, lane, [] {});
}

// One record of every token of a row tile; grid (records, row tiles).
template <class... Ks>
__device__ __forceinline__ void rotate(Kinds<Ks...> kinds, const NarrowArgs& args) {
    extern __shared__ __align__(128) u8 memory[];  // a record
    const u32 warp = threadIdx.x / 32;
    u32 index = 0;
    let_next_start();
    wait_for_previous();
    if (gridDim.y > 1 && args.counters != nullptr)  // the counters of several row tiles are scratch that nobody has cleared
        for (u32 i = (blockIdx.y * gridDim.x + blockIdx.x) * ROTATE_THREADS + threadIdx.x; i < args.total_strips * gridDim.y;
             i += gridDim.x * gridDim.y * ROTATE_THREADS)
            args.counters[i] = 0;
    while (index + 1 < args.shard_count && blockIdx.x >= args.shards[index + 1].first_record) ++index;
    const NarrowShard& shard = args.shards[index];
    const u32 item = shard.first_item + blockIdx.x - shard.first_record;
    u32 number = 0;
    ((number++ == shard.kind ? rotate_item<Ks>(shared_address(memory), args, shard, item, warp, threadIdx.x & 31) : void()), ...);
    __syncthreads();
    const u32 chunks = args.record_bytes / 16;
    uint4* target = const_cast<uint4*>(args.records) + (static_cast<u64>(blockIdx.y) * args.total_records + blockIdx.x) * chunks;
    for (u32 chunk = threadIdx.x; chunk < chunks; chunk += ROTATE_THREADS) target[chunk] = reinterpret_cast<const uint4*>(memory)[chunk];
}

// One thread block of the narrow kernel: its ring of weights, the activations that it keeps, and where its sums go.
#pragma once
#include "narrow_finish.cuh"
#include "narrow_ring.cuh"

// The launch's kinds of shards, and what shared memory holds for the largest of them.
template <class... Ks>
struct Kinds {
    static constexpr int tile_rows = (Ks::tile_rows, ...);  // the same for all
    // 2·K of all kinds, or 0 where they differ.
    static constexpr int half_bits() {
        int least = 1 << 30, most = 0;
        ((least = Ks::half_bits < least ? Ks::half_bits : least, most = Ks::half_bits > most ? Ks::half_bits : most), ...);
        return least == most ? most : 0;
    }
    static constexpr u32 slot_bytes(int tiles) {
        u32 most = 0;
        ((most = max_of(most, ITEM_TILES * (16 * tiles * Ks::half_bits + ROW_PAD))), ...);
        return most;
    }

private:
    static constexpr u32 max_of(u32 a, u32 b) { return a > b ? a : b; }
};

// One block's state through its strips.
template <int J, int RING, bool CLUSTER, class List>
struct NarrowBlock {
    static constexpr bool together = CLUSTER;  // the blocks of a strip form a cluster
    static constexpr u32 slot_bytes = List::slot_bytes(J), ring_bytes = RING * slot_bytes;
    const NarrowArgs& args;
    u8* records;                    // kept items
    u32 exchange;                   // shared address: sums of the cluster's blocks
    u32 kept_begin, kept_end, half; // which, and in which half of the memory for them
    u32 next_end, end;              // of the items fetched after them; of the block's range
    u32 ring_end, slot;             // shared addresses: behind the warp's ring, of the slot being read
    Cursor<J, List::half_bits()> cursor;
    u32 warp;
    int lane;

    __device__ __forceinline__ void start(u32 ring, u32 begin, u32 range_end) {
        end = range_end, kept_begin = kept_end = next_end = begin, half = 0;
        cursor.item = begin, cursor.end = end, cursor.left = 0;
        cursor.seek(args, warp, lane);
        ring_end = ring + ring_bytes;
#pragma unroll 1
        for (slot = ring; slot != ring_end; slot += slot_bytes) cursor.fetch(args, slot, warp, lane);
        slot = ring;
    }
    __device__ __forceinline__ void next_slot() {
        __syncwarp();
        cursor.fetch(args, slot, warp, lane);
        slot += slot_bytes;
        if (slot == ring_end) slot -= ring_bytes;
    }
    // Items of a warp that has no columns.
    __device__ __forceinline__ void skip(u32 items) {
#pragma unroll 1
        for (; items; --items) next_slot();
    }
    // Makes sure of the activations of an item and, as far as there is room, those after it. Of what a launch before rotated, the
    // part after that is fetched behind the arithmetic. What other kernels write is touched after this only.
    template <class K>
    __device__ __forceinline__ void keep(u32 item, const NarrowShard& shard) {
        if (item < kept_end) return;
        constexpr u32 channels = WARPS * J * 16;
        const u32 shard_end = shard.first_item + (shard.out_features + channels - 1) / channels * (shard.in_features / BLOCK);
        const u32 last = min(end, shard_end), base = shared_address(records), size = args.kept_items * args.record_bytes;
        const bool fetched = item < next_end;
        wait_for_previous();
        if (!fetched) {
            __syncthreads();  // nobody reads the ones before any more
            next_end = min(item + args.kept_items, last), half = 0;
            if (args.records == nullptr) rotate_items<K, WARPS>(base, args, shard, item, next_end, warp, lane);
            else fetch_items(base, args, shard, item, next_end), end_fetch(), wait_for_fetch<0>();
        } else {
            half ^= args.kept_halves - 1;
            wait_for_fetch<RING - 1>();  // RING fetches of weights have followed
        }
        if constexpr (WARPGROUPS && K::arithmetic == HALF) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        kept_begin = item, kept_end = next_end;
        if (args.kept_halves > 1 && kept_end < last) {
            next_end = min(kept_end + args.kept_items, last);
            fetch_items(base + (half ^ 1) * size, args, shard, kept_end, next_end);
        }
    }
    // Shared address of a kept item's record.
    __device__ __forceinline__ u32 record_of(u32 item) const {
        return shared_address(records) + (half * args.kept_items + item - kept_begin) * args.record_bytes;
    }
};

// A warp's sums go to whoever finishes the strip.
template <class K, int J, class Block>
__device__ __forceinline__ void end_piece(Block& block, const Totals<K> (&totals)[J], const Strip& strip, bool columns) {
#if __CUDA_ARCH__ >= 900
    if constexpr (Block::together) {
        wait_for_cluster();
        if (columns) send_piece<K, J>(block.args, totals, strip, block.exchange, block.warp, block.lane);
        return;
    }
#endif
    if (columns) store_piece<K, J>(block.args, totals, strip, block.warp, block.lane);
}

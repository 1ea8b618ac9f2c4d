// One thread block of the narrow kernel: its ring of weights, the activations that it keeps, and where its sums go.
#pragma once
#include "narrow_ends.cuh"
#include "narrow_input.cuh"
#include "narrow_ring.cuh"
#include "narrow_together.cuh"

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
    static constexpr u32 slot_bytes(int tiles) {
        u32 most = 0;
        ((most = max_of(most, ITEM_TILES * (16 * tiles * Ks::half_bits + ROW_PAD))), ...);
        return most;
    }

private:
    static constexpr u32 max_of(u32 a, u32 b) { return a > b ? a : b; }
};

// What `begin_keeping` found or did: the item's activations are there, or on their way since the items before; now asked for, or only
// the first of several rounds of them, with the rest of the ring to follow.
enum Asked { KEPT, FETCHED, ASKED, ASKED_FIRST };

// Whether a warp that rotates in several rounds asks for the rest of its ring after the input of the last. As measured.
template <class K, class List> constexpr bool ASKS_LATER = List::single && (K::arithmetic != HALF || (K::byte_sums && K::tile_rows > 8));

// One block's state through its strips.
template <int J, int RING, bool CLUSTER, class List>
struct NarrowBlock {
    static constexpr bool single = List::single;
    static constexpr bool together = CLUSTER;  // the blocks of a strip form a cluster
    static constexpr u32 slot_bytes = List::slot_bytes(J), ring_bytes = RING * slot_bytes;
    const NarrowArgs& args;
    StripEnds<J, List::tile_rows> ends;
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
        ring_end = ring + ring_bytes, slot = ring;
        fetch_slots(EARLY);
        slot = ring;
    }
    __device__ __forceinline__ void fetch_slots(u32 slots) {
#pragma unroll 1
        for (; slots; --slots, slot += slot_bytes) cursor.fetch(args, slot, warp, lane);
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
    // Makes sure of the activations of an item and, as far as there is room, those after it, in two steps: what memory has is asked
    // for, and waited for. Of what a launch before rotated, the part after that is fetched behind the arithmetic. What other kernels
    // write is touched after this only. The first time most of a ring is asked for behind the activations, which would come after it.
    template <class K>
    __device__ __forceinline__ Asked begin_keeping(RawOf<K>& raw, u32 item, const NarrowShard& shard) {
        if (item < kept_end) return KEPT;
        if (item < next_end) return FETCHED;
        next_end = min(item + args.kept_items, last_item(shard)), half = 0;
        if (args.records == nullptr) {
            const Rotations<K, WARPS> rotations(shared_address(records), args, shard, item, next_end, warp);
            Rotation at{};
            if (rotations.any()) {
                at = rotations.spread ? rotations.rotation_of(args, rotations.first) : rotations.rotation(args, lane);
                if (rotations.spread) load_scales_spread(raw, shard, at, lane);
                else load_scales(raw, shard, at, lane);
            }
            wait_for_previous();
            if (rotations.any()) {
                if (rotations.spread) load_input_spread(raw, args, at, lane);
                else load_input(raw, args, at, rotations.whole, lane);
            }
            if (announces()) ends.mark_missing(lane);
            // A block whose items all fit its rings lets nobody ask for more weights before everybody has asked for input. As measured.
            if (K::half_bits <= 8 && rotations.spread && !begun() && end - item <= RING) __syncthreads();
            if (ASKS_LATER<K, List> && !begun() && rotations.more()) return ASKED_FIRST;
        } else {
            wait_for_previous();
            if (begun()) __syncthreads();  // nobody reads the ones before any more
            fetch_items(shared_address(records), args, shard, item, next_end), end_fetch();
            if (announces()) ends.mark_missing(lane);
        }
        if (!begun()) fill_ring();
        return ASKED;
    }
    // Whether activations were kept before.
    __device__ __forceinline__ bool begun() const { return kept_begin != kept_end; }
    // Whether this warp says that the block has begun: once, in two steps with a barrier between them.
    __device__ __forceinline__ bool announces() const { return !together && !begun() && warp == ends.announcer; }
    // Asks for what `start` has left of the ring.
    __device__ __forceinline__ void fill_ring() {
        slot += EARLY * slot_bytes;
        fetch_slots(RING - EARLY);
        slot -= ring_bytes;
    }
    // Until the weights of the slot being read have arrived.
    template <class K>
    __device__ __forceinline__ void wait_for_slot(Asked asked) const {
        if (ASKS_LATER<K, List> && asked == ASKED_FIRST) wait_for_fetch<EARLY - 1>();
        else wait_for_fetch<RING - 1>();
    }
    template <class K>
    __device__ __forceinline__ void end_keeping(Asked asked, RawOf<K>& raw, u32 item, const NarrowShard& shard) {
        if (asked == KEPT) return;
        const u32 last = last_item(shard);
        if (asked == FETCHED) {
            half ^= args.kept_halves - 1;
            wait_for_fetch<RING - 1>();  // RING fetches of weights have followed
        } else if (args.records == nullptr) {
            if (begun()) __syncthreads();  // nobody reads the ones before any more
            Rotations<K, WARPS> rotations(shared_address(records), args, shard, computed_here(item), next_end, warp);
            rotate_items(raw, rotations, args, shard, computed_here(lane), [&] {
                if (ASKS_LATER<K, List> && asked == ASKED_FIRST) fill_ring();
            });
        } else if (begun()) {
            wait_for_fetch<0>();
        } else {
            wait_for_fetch<RING - EARLY>();
        }
        if constexpr (WARPGROUPS && K::arithmetic == HALF) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (announces()) ends.count(args, lane);
        kept_begin = item, kept_end = next_end;
        if (args.kept_halves > 1 && kept_end < last) {
            next_end = min(kept_end + args.kept_items, last);
            fetch_items(shared_address(records) + (half ^ 1) * args.kept_items * args.record_bytes, args, shard, kept_end, next_end);
        }
    }
    __device__ __forceinline__ u32 last_item(const NarrowShard& shard) const {
        return min(end, shard.end_item);
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
    if (columns) store_piece<K, J>(block.args, totals, strip, block.warp, computed_here(block.lane));
}

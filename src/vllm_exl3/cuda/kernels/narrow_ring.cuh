// One warp's ring of weights in shared memory: items stream in behind the arithmetic, 16 bytes a lane and copy.
//
// Each warp fetches the columns that it multiplies, so nothing in the main loop waits for another warp. A slot holds an item: 8
// rows, one a k-tile, of the warp's J tiles.
#pragma once
#include "narrow_problem.cuh"

// Items of a ring that are asked for before the activations. Memory answers in order, and a whole ring on every multiprocessor takes it
// two microseconds.
constexpr u32 EARLY = 1;

// Starts to copy 16 bytes to shared memory.
__device__ __forceinline__ void fetch_16(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// What a thread has started since the last time is one fetch.
__device__ __forceinline__ void end_fetch() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// A warp's view of where the next items come from. Moving on inside a strip is one addition.
//
// A copy moves 16 bytes a lane. `rows` k-tile rows are copied at once, as many as 32 lanes hold, so that every further copy lies a
// constant number of bytes after the one before; lanes that are left over copy nothing.
template <int J, int HALF_BITS>
struct Cursor {
    const u8* source;  // the lane's first 16 bytes of the item
    u32 target;        // where they go, from the beginning of a slot
    u32 item, end;     // in the block's range
    u32 left;          // items of the strip from this one on, in the range
    u32 pitch;         // bytes from one k-tile row to the next
    u32 half_bits;     // where shards differ
    bool copies;       // whether this lane copies: the strip reaches the warp's columns, and the lane is not left over

    __device__ __forceinline__ void seek(const NarrowArgs& args, u32 warp, int lane) {
        if (item >= end) return;
        u32 index = 0;
        while (item >= args.shards[index].end_item) ++index;
        const NarrowShard& shard = args.shards[index];
        half_bits = shard.half_bits;
        const u32 local = item - shard.first_item, tiles = shard.out_features / 16, depth = shard.depth;
        const u32 strip = over(local, shard.depth_inverse), tile = strip * (WARPS * J) + warp * J, k = local - strip * depth;
        const u32 row = lane / row_copies(), column = lane % row_copies();
        pitch = tiles * 16 * bits();
        copies = tile < tiles && row < rows_at_once(row_copies());
        left = min(depth - k, end - item);
        source = shard.trellis + static_cast<u64>(ITEM_TILES * k) * pitch + tile * 16 * bits() + row * pitch + 16 * column;
        target = row * row_bytes() + 16 * column;
    }

    // Starts the copies of the item into a slot and moves on to the next.
    __device__ __forceinline__ void fetch(const NarrowArgs& args, u32 slot, u32 warp, int lane) {
        if (left) {
            if (copies) copy(slot + target);
            source += static_cast<u64>(ITEM_TILES) * pitch;
            ++item;
            if (--left == 0) seek(args, warp, lane);
        }
        end_fetch();
    }

private:
    __device__ __forceinline__ u32 bits() const { return HALF_BITS ? HALF_BITS : half_bits; }
    __device__ __forceinline__ u32 row_copies() const { return J * bits(); }  // of one k-tile's row of the warp's columns
    __device__ __forceinline__ u32 row_bytes() const { return 16 * row_copies() + ROW_PAD; }
    static __device__ __forceinline__ u32 rows_at_once(u32 row_copies) {
        u32 rows = ITEM_TILES;
        while (rows * row_copies > 32) rows /= 2;
        return rows;
    }
    __device__ __forceinline__ void copy(u32 to) const {
        const u32 rows = rows_at_once(row_copies());
        if constexpr (HALF_BITS != 0) {
#pragma unroll
            for (u32 row = 0; row < ITEM_TILES; row += rows_at_once(J * HALF_BITS))
                fetch_16(to + row * row_bytes(), source + static_cast<u64>(row) * pitch);
        } else {
#pragma unroll 1
            for (u32 row = 0; row < ITEM_TILES; row += rows) fetch_16(to + row * row_bytes(), source + static_cast<u64>(row) * pitch);
        }
    }
};

// Until all but the last PENDING fetches of this warp have arrived.
template <int PENDING>
__device__ __forceinline__ void wait_for_fetch() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
    __syncwarp();
}

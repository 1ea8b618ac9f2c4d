// One warp's ring of weights in shared memory: items stream in behind the arithmetic, 16 bytes a lane and copy.
//
// Each warp fetches the columns that it multiplies, so nothing in the main loop waits for another warp. A slot holds an item: 8
// rows, one a k-tile, of the warp's J tiles.
#pragma once
#include "narrow_problem.cuh"

// Keeps the compiler from computing a value again wherever it is used.
__device__ __forceinline__ u32 kept_value(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

// A warp's view of where the next items come from. Moving on inside a strip is one addition.
template <int J, int HALF_BITS>
struct Cursor {
    const u8* source;   // the lane's first 16 bytes of the item
    u32 item, end;      // in the block's range
    u32 left;           // items of the strip from this one on, in the range
    u32 pitch;          // bytes from one k-tile row to the next
    u32 half_bits;
    bool columns;       // whether the strip reaches this warp's columns

    // Copies of 16 bytes: of one k-tile's row of the warp's columns, and of an item; `regular` where every round of 32 lanes covers
    // whole rows or an equal part of one.
    static constexpr u32 row_copies = J * (HALF_BITS ? HALF_BITS : 1), copies = ITEM_TILES * row_copies, rounds = (copies + 31) / 32;
    static constexpr bool regular = HALF_BITS != 0 && 32 % row_copies == 0 && copies >= 32;

    __device__ __forceinline__ void seek(const NarrowArgs& args, u32 warp, int lane) {
        if (item >= end) return;
        u32 index = 0;
        while (index + 1 < args.shard_count && item >= args.shards[index + 1].first_item) ++index;
        const NarrowShard& shard = args.shards[index];
        const u32 local = item - shard.first_item, tiles = shard.out_features / 16, depth = shard.in_features / BLOCK;
        const u32 tile = local / depth * (WARPS * J) + warp * J, k = local % depth;
        half_bits = HALF_BITS ? HALF_BITS : shard.half_bits;
        pitch = tiles * 16 * half_bits;
        columns = tile < tiles;
        left = min(depth - k, end - item);
        source = shard.trellis + static_cast<u64>(ITEM_TILES * k) * pitch + tile * 16 * half_bits;
        if (regular) source += lane / row_copies * pitch + lane % row_copies * 16;
    }

    // Starts the copies of the item into a slot and moves on to the next. `target` is the slot, for `regular` the lane's part of it.
    __device__ __forceinline__ void fetch(const NarrowArgs& args, u32 target, u32 warp, int lane) {
        if (left) {
            if (columns) {
                if constexpr (regular) copy_regular(target);
                else if constexpr (HALF_BITS != 0) copy(target, row_copies, copies, lane);
                else copy(target, J * half_bits, ITEM_TILES * J * half_bits, lane);
            }
            source += static_cast<u64>(ITEM_TILES) * pitch;
            ++item;
            if (--left == 0) seek(args, warp, lane);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    static __device__ __forceinline__ u32 lane_target(int lane) {
        return regular ? kept_value(lane / row_copies * (16 * row_copies + ROW_PAD) + lane % row_copies * 16) : 0;
    }

private:
    __device__ __forceinline__ void copy_regular(u32 target) const {
        constexpr u32 rows = 32 / row_copies;
#pragma unroll
        for (u32 round = 0; round < rounds; ++round)
            async_copy(target + round * rows * (16 * row_copies + ROW_PAD), source + static_cast<u64>(round * rows) * pitch);
    }
    __device__ __forceinline__ void copy(u32 slot, u32 row_copies_now, u32 copies_now, int lane) const {
#pragma unroll
        for (u32 number = lane; number < copies_now; number += 32) {
            const u32 row = number / row_copies_now, column = number % row_copies_now;
            async_copy(slot + row * (16 * row_copies_now + ROW_PAD) + 16 * column, source + row * pitch + 16 * column);
        }
    }
    static __device__ __forceinline__ void async_copy(u32 target, const u8* from) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(from) : "memory");
    }
};

// Until all but the last PENDING fetches of this warp have arrived.
template <int PENDING>
__device__ __forceinline__ void wait_for_fetch() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
    __syncwarp();
}

// One warp's pipeline of weights in shared memory: k blocks stream in behind the arithmetic, 16 bytes a lane and copy.
//
// Each warp fetches the columns that it multiplies, so nothing in the main loop waits for another warp. A stage holds a k block: 8
// rows, one a k-tile, of the warp's J tiles.
#pragma once
#include "base/cp_async.cuh"
#include "narrow/arguments.cuh"

// K blocks of a pipeline that are issued before the activations. Memory answers in order, and a whole pipeline on every multiprocessor takes it
// two microseconds.
constexpr u32 EARLY_STAGES = 1;

// A warp's view of where the next k blocks come from. Moving on inside an n tile is one addition.
//
// A copy moves 16 bytes a lane. `rows` k-tile rows are copied at once, as many as 32 lanes hold, so that every further copy lies a
// constant number of bytes after the one before; lanes that are left over copy nothing.
template <int J, int HALF_BITS>
struct Cursor {
    const u8* source;  // the lane's first 16 bytes of the k block
    u32 target;        // where they go, from the beginning of a stage
    u32 k_block, end;     // in the block's range
    u32 left;          // k blocks of the n tile from this one on, in the range
    u32 pitch;         // bytes from one k-tile row to the next
    u32 half_bits;     // where shards differ
    bool copies;       // whether this lane copies: the n tile reaches the warp's columns, and the lane is not left over

    __device__ __forceinline__ void seek(const NarrowArgs& args, u32 warp, int lane) {
        if (k_block >= end) return;
        u32 index = 0;
        while (k_block >= args.shards[index].end_k_block) ++index;
        const NarrowShard& shard = args.shards[index];
        half_bits = shard.half_bits;
        const u32 local = k_block - shard.first_k_block, tiles = shard.out_features / 16, depth = shard.depth;
        const u32 n_tile = fast_divide(local, shard.depth_inverse), tile = n_tile * (WARPS * J) + warp * J, k = local - n_tile * depth;
        const u32 row = lane / row_copies(), column = lane % row_copies();
        pitch = tiles * 16 * bits();
        copies = tile < tiles && row < rows_at_once(row_copies());
        left = min(depth - k, end - k_block);
        source = shard.trellis + static_cast<u64>(K_TILES * k) * pitch + tile * 16 * bits() + row * pitch + 16 * column;
        target = row * row_bytes() + 16 * column;
    }

    // Starts the copies of the k block into a stage and moves on to the next.
    __device__ __forceinline__ void fetch(const NarrowArgs& args, u32 stage, u32 warp, int lane) {
        if (left) {
            if (copies) copy(stage + target);
            source += static_cast<u64>(K_TILES) * pitch;
            ++k_block;
            if (--left == 0) seek(args, warp, lane);
        }
        cp_async_commit();
    }

private:
    __device__ __forceinline__ u32 bits() const { return HALF_BITS ? HALF_BITS : half_bits; }
    __device__ __forceinline__ u32 row_copies() const { return J * bits(); }  // of one k-tile's row of the warp's columns
    __device__ __forceinline__ u32 row_bytes() const { return 16 * row_copies() + ROW_PAD; }
    static __device__ __forceinline__ u32 rows_at_once(u32 row_copies) {
        u32 rows = K_TILES;
        while (rows * row_copies > 32) rows /= 2;
        return rows;
    }
    __device__ __forceinline__ void copy(u32 to) const {
        const u32 rows = rows_at_once(row_copies());
        if constexpr (HALF_BITS != 0) {
#pragma unroll
            for (u32 row = 0; row < K_TILES; row += rows_at_once(J * HALF_BITS))
                cp_async_16(to + row * row_bytes(), source + static_cast<u64>(row) * pitch);
        } else {
#pragma unroll 1
            for (u32 row = 0; row < K_TILES; row += rows) cp_async_16(to + row * row_bytes(), source + static_cast<u64>(row) * pitch);
        }
    }
};

// Until all but the last PENDING fetches of this warp have arrived.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
    cp_async_wait<PENDING>();
    __syncwarp();
}

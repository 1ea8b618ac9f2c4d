// Where the wide kernel's k blocks lie in memory.
#pragma once
#include "wide/arguments.cuh"

constexpr int HALF_TILES = 4;

// The k block that is fetched next, and where its bytes lie. Moving on inside an n tile is two additions.
struct Cursor {
    const u8* weights;      // first k-tile row of the k block
    const u8* activations;
    u32 k_block, end;          // this warp's position in the block's range
    u32 k, depth;           // position inside the n tile, in k blocks
    u32 pitch;              // bytes from one k-tile row to the next
    u32 row_bytes;          // of one k-tile row of half an n tile of 128 channels
    u32 n_tile_bytes;        // of one k-tile row of the whole n tile
    u32 activation_bytes;   // of a k block

    __device__ __forceinline__ bool valid() const { return k_block < end; }
    __device__ __forceinline__ void seek(const LinearArgs& args) {
        u32 index = 0;
        while (index + 1 < args.shard_count && k_block >= args.shards[index + 1].first_k_block) ++index;
        const ShardArgs& shard = args.shards[index];
        const u32 local = k_block - shard.first_k_block, tile_bytes = 16 * shard.half_bits;
        depth = shard.in_features / BLOCK_K;
        const u32 n_tile = local / depth;
        k = local % depth;
        pitch = shard.out_features / 16 * tile_bytes;
        row_bytes = HALF_TILES * tile_bytes;
        activation_bytes = k_block_activation_bytes(args.stored_rows);
        weights = reinterpret_cast<const u8*>(shard.trellis) + static_cast<u64>(4 * k) * pitch + n_tile * (args.n_tile_columns * tile_bytes);
        n_tile_bytes = min(args.n_tile_columns, shard.out_features / 16 - n_tile * args.n_tile_columns) * tile_bytes;
        activations = args.activations + static_cast<u64>(shard.activation_block) * 16 +
            static_cast<u64>(blockIdx.y * depth + k) * activation_bytes;
    }
    __device__ __forceinline__ void advance(const LinearArgs& args, u32 step) {
        k_block += step, k += step;
        if (k < depth) {
            weights += static_cast<u64>(4 * step) * pitch;
            activations += step * activation_bytes;
        } else if (valid()) {
            seek(args);
        }
    }
};

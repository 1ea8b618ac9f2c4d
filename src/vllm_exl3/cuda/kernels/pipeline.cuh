// Where the wide kernel's units lie in memory.
#pragma once
#include "problem.cuh"

constexpr int HALF_TILES = 4;
constexpr int ROW_PAD = 32;  // bytes after each k-tile's row: makes the lanes' reads free of bank conflicts

// The unit that is fetched next, and where its bytes lie. Moving on inside a strip is two additions.
struct Cursor {
    const u8* weights;      // first k-tile row of the unit
    const u8* activations;
    u32 unit, end;          // this warp's position in the block's range
    u32 k, depth;           // position inside the strip, in units
    u32 pitch;              // bytes from one k-tile row to the next
    u32 row_bytes;          // of one k-tile row of half a strip of 128 channels
    u32 strip_bytes;        // of one k-tile row of the whole strip
    u32 activation_bytes;   // of a unit

    __device__ __forceinline__ bool valid() const { return unit < end; }
    __device__ __forceinline__ void seek(const LinearArgs& args) {
        u32 index = 0;
        while (index + 1 < args.shard_count && unit >= args.shards[index + 1].first_unit) ++index;
        const ShardArgs& shard = args.shards[index];
        const u32 local = unit - shard.first_unit, tile_bytes = 16 * shard.half_bits;
        depth = shard.in_features / UNIT_IN;
        const u32 strip = local / depth;
        k = local % depth;
        pitch = shard.out_features / 16 * tile_bytes;
        row_bytes = HALF_TILES * tile_bytes;
        activation_bytes = unit_activation_bytes(args.stored_rows);
        weights = reinterpret_cast<const u8*>(shard.trellis) + static_cast<u64>(4 * k) * pitch + strip * (args.strip_tiles * tile_bytes);
        strip_bytes = min(args.strip_tiles, shard.out_features / 16 - strip * args.strip_tiles) * tile_bytes;
        activations = args.activations + static_cast<u64>(shard.activation_block) * 16 +
            static_cast<u64>(blockIdx.y * depth + k) * activation_bytes;
    }
    __device__ __forceinline__ void advance(const LinearArgs& args, u32 step) {
        unit += step, k += step;
        if (k < depth) {
            weights += static_cast<u64>(4 * step) * pitch;
            activations += step * activation_bytes;
        } else if (valid()) {
            seek(args);
        }
    }
};

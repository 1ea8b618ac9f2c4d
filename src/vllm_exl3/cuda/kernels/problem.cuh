// What a launch is told, and how work is cut: mirrored field by field in vllm_exl3/cuda/geometry.py.
//
// Work is a list of units. A unit is 64 input × 128 output channels for one tile of rows (tokens); units of one strip
// (128 output channels, one Hadamard block) lie together with k rising, strips of one shard together, row tiles inside
// a strip. The list is cut into one equal contiguous range per thread block, which depends on (N, K, blocks) alone.
#pragma once
#include "types.cuh"

constexpr int MAX_SHARDS = 8;
constexpr int UNIT_IN = 64;
constexpr int STRIP = 128;

struct ShardArgs {
    const u32* trellis;
    const u16* suh;        // fp16 [in_features]
    const u16* svh;        // fp16 [out_features]
    u32 in_features;       // stored, a multiple of 128
    u32 out_features;      // stored, a multiple of 128
    u32 crop_start;        // first stored column that is returned
    u32 crop_size;
    u32 out_column;        // where its returned columns begin in the output
    u32 kind;              // index in the kernel's list of kinds
    u32 half_bits;
    u32 arithmetic;
    u32 codebook;
    u32 first_unit;        // in the launch's list of units
    u32 first_strip;       // in the launch's list of (strip, row tile)
    u32 activation_block;  // where its transformed activations begin, in 16 bytes
};

struct LinearArgs {
    ShardArgs shards[MAX_SHARDS];
    const void* x;
    void* out;
    const void* bias;      // [sum of crop_size] or null
    u8* activations;       // scratch: transformed activations in fragment order
    float* scales;         // scratch [shard][rows]: what undoes the row's scale
    int* sums;             // scratch [shard][rows][parts]: sums of quantised activations
    u32* counters;         // scratch [strips × row tiles]: arrivals, zeroed by the transform
    uint4* partials;       // scratch [2 × blocks][256 × T]: sums of strips that several blocks share
    i64 x_stride;          // elements
    i64 out_stride;
    u32 shard_count;
    u32 rows;
    u32 row_tiles;
    u32 tile_rows;         // tokens a row tile holds
    u32 stored_rows;       // tokens whose activations are stored a row tile: min(rows, tile_rows)
    u32 in_width;          // columns of x; the rest up to in_features counts as zero
    u32 x_type;
    u32 out_type;
    u32 bias_type;
    u32 parts;             // blocks that share one row in the transform
    u32 total_units;
    u32 total_strips;
    u32 ring_units;        // units each warp's ring holds
    u32 half_stride;       // bytes of half a unit's weights in the ring, the widest kind's
    u32 activation_stride; // bytes of a unit's activations in the ring, the widest kind's
};

// Fragment order of the activations of one unit: `matrices` 8×8 matrices of 16-byte rows; a row is one column of the
// MMA's B operand, word q of it belongs to k-tile q of the unit. INTEGER stores two rows a token (high and low plane).
__device__ __forceinline__ u32 unit_matrices(u32 arithmetic) { return arithmetic == 2 /* HALF */ ? 8 : 16; }
__device__ __forceinline__ u32 token_rows(u32 arithmetic) { return arithmetic == 0 /* INTEGER */ ? 2 : 1; }
__device__ __forceinline__ u32 unit_activation_bytes(u32 arithmetic, u32 stored_rows) {
    return unit_matrices(arithmetic) * token_rows(arithmetic) * stored_rows * 16;
}

__device__ __forceinline__ u32 range_begin(u32 block, u32 blocks, u32 units) {
    return static_cast<u32>(static_cast<u64>(block) * units / blocks);
}
__device__ __forceinline__ u32 block_of_unit(u32 unit, u32 blocks, u32 units) {
    return static_cast<u32>((static_cast<u64>(unit + 1) * blocks - 1) / units);
}

// Programmatic dependent launch: what the kernel before wrote may be touched only after `wait_for_previous`.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

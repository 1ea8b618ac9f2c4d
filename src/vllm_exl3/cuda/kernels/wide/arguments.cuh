// Launch arguments of the wide kernel, and how its work is partitioned. The host reads the declarations (cuda/declarations.py).
//
// Work is a list of k blocks. A k block is 64 input channels × one n tile of output channels; k blocks of one n tile lie together with k
// rising, n tiles of one shard together. An n tile is one or two Hadamard blocks (128 channels). The list is cut into contiguous
// ranges, one a thread block in x, equal within one k block; that depends on (N, K, blocks) alone and so does the order of every
// sum. blockIdx.y is the tile of rows (tokens).
#pragma once
#include "base/launch.cuh"
#include "base/ranges.cuh"
#include "base/shapes.cuh"

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
    u32 first_k_block;        // in the launch's list of k blocks
    u32 first_n_tile;       // in the launch's list of n tiles
    u32 activation_block;  // where its transformed activations begin, in 16 bytes
};

struct LinearArgs {
    ShardArgs shards[MAX_SHARDS];
    const void* x;
    void* out;
    const void* bias;      // [sum of crop_size] or null
    u8* activations;       // scratch: transformed activations in fragment order
    float* scales;         // scratch [shard][rows]: what undoes the row's scale
    u32* counters;         // [row tiles][n tiles]: arrivals; zero before and after every launch
    uint4* partials;       // scratch [row tiles][2 × blocks][partial_stride]: sums of n tiles that several blocks share
    i64 x_stride;          // elements
    i64 out_stride;
    u32 shard_count;
    u32 rows;
    u32 row_tiles;
    u32 tile_rows;         // tokens a row tile holds
    u32 stored_rows;       // tokens whose activations are stored a row tile
    u32 in_width;          // columns of x; the rest up to in_features counts as zero
    u32 x_type;
    u32 out_type;
    u32 bias_type;
    u32 transform_blocks;          // blocks that share one row in the transform
    u32 range_k_blocks;       // k blocks of a block's range, and how many ranges hold one more
    u32 longer_ranges;
    u32 n_tiles;
    u32 n_tile_columns;       // tile columns of an n tile: 8 or 16
    u32 partial_stride;    // uint4 of one block's sums of an n tile
    u32 pipeline_stages;        // k blocks a pipeline holds
    u32 half_stride;       // bytes of half a k block's weights in the pipeline, the widest kind's
    u32 activation_stride; // bytes of a k block's activations in the pipeline
};

// Fragment order of the activations of one k block: eight 8×8 matrices of 16-byte rows; a row is one column of the MMA's B operand,
// word q of it belongs to k-tile q of the k block.
__device__ __forceinline__ u32 k_block_activation_bytes(u32 stored_rows) { return 8 * stored_rows * 16; }

// Launch arguments of the prefill kernels and of gemm/gemm.cu, and how work is partitioned. The host reads the declarations (cuda/declarations.py).
//
// A tile is one Hadamard block (128 output channels) × INSTANCE_TOKENS tokens; the blocks of a cluster take neighbouring
// Hadamard blocks of the same tokens, so that one copy brings the activations to all of them. A k block is 64 input channels.
// Clusters take whole tiles in turn; what does not fill them all is split into ranges of k blocks, one a cluster.
#pragma once
#include "base/codebook.cuh"
#include "base/launch.cuh"
#include "base/ranges.cuh"
#include "base/shapes.cuh"

struct PrefillShard {
    const u32* trellis;
    const u16* suh;      // fp16 [in_features]
    const u16* svh;      // fp16 [out_features]
    u32 out_features;    // stored, a multiple of 128
    u32 crop_start;      // first stored column that is returned
    u32 crop_size;
    u32 out_column;      // where its returned columns begin in the output
    u32 kind;            // index in the kernel's list of kinds
    u32 half_bits;
    u32 first_n_tile;     // in the launch's list of n tiles: as many Hadamard blocks as a cluster has blocks; for gemm/gemm.cu two
    u32 complements;     // whether activations are stored for byte sums: see base/codebook.cuh, `complemented`
};

struct PrefillArgs {
    PrefillShard shards[MAX_SHARDS];
    const void* x;
    void* out;
    const void* bias;    // [sum of crop_size] or null
    u8* activations;     // scratch [shard][row tile][k block][8 matrices][tokens][16 bytes]
    float* scales;       // scratch [shard][rows]: what undoes the row's scale
    float* offsets;      // scratch [shard][rows][offset_parts]: what byte sums leave out, as parts of a sum, times the row's scale
    uint4* partials;     // scratch [2][ranges][Hadamard blocks of an n tile][16 tokens][vectors of eight sums][256]: of parts of tiles, see prefill/partials.cuh; for gemm/gemm.cu float [2, or 1 with equal parts][ranges][2][tokens][128]
    u32* arrivals;       // scratch [split tiles][Hadamard blocks of an n tile]: see prefill_splits.cuh; null: a launch of its own finishes split tiles; for gemm/gemm.cu one an n tile
    const void* residual;     // of x's type [rows][in_width], added to x before an RMS norm by gemm/rotate.cu; or null
    void* residual_out;       // the sum
    const void* norm_weight;  // [in_width] of x's type
    i64 x_stride;        // elements
    i64 out_stride;
    u32 shard_count;
    u32 rows;
    u32 row_tiles;
    u32 tile_rows;       // tokens of a tile
    u32 in_width;        // columns of x; the rest up to in_features counts as zero
    u32 in_features;
    u32 x_type;
    u32 out_type;
    u32 bias_type;
    u32 n_tiles;          // of all shards
    u32 group;           // row tiles that are multiplied while their activations stay in the L2
    u32 whole_tiles;     // tiles that one cluster computes from end to end
    u32 range_k_blocks;     // k blocks of a range, and how many ranges hold one more
    u32 longer_ranges;
    u32 ranges;
    u32 stages;          // k blocks that the pipeline holds
    u32 weight_bytes;    // of a k block in the pipeline, the widest kind's
    u32 n_blocks;    // Hadamard blocks of an n tile
    u32 block_rows;      // of a block of the transform: 1, 2, 4, 8 or 16
    u32 rows_in_shared;           // whether the transform's blocks have shared memory for their rows
    u32 cluster_size;         // blocks of a cluster of prefill/rotate.cu or gemm/rotate.cu, which share their rows
    u32 split_k;     // gemm/gemm.cu: whether every n tile is split into equal parts, one a thread block
    u32 offset_parts;    // blocks of a cluster of gemm/rotate.cu, or Hadamard blocks of k where prefill/transform.cu takes its place
    float epsilon;       // of the RMS norm
};

// Where a range leaves its sums of the tile whose k blocks begin at `tile_begin`: it shares at most the tiles at its two ends.
template <class Partials>
__device__ __forceinline__ uint4* prefill_partials(const PrefillArgs& args, u32 range, u32 tile_begin, u32 place) {
    const u32 second = range_begin(args, range) < tile_begin ? 1 : 0;
    return args.partials + static_cast<u64>((second * args.ranges + range) * args.n_blocks + place) * (args.tile_rows / 16 * Partials::VECTORS * 256);
}

// By a thread block of the kernel ahead of the GEMM.
__device__ __forceinline__ void clear_arrivals(const PrefillArgs& args) {
    if (args.arrivals == nullptr) return;
    const u32 count = (args.n_tiles * args.row_tiles - args.whole_tiles) * args.n_blocks;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) args.arrivals[i] = 0;
}

// A part of a tile: k blocks [begin, end) of its k.
struct PrefillWorkTile {
    u32 shard, n_tile, row_tile;  // the n tile counts from the shard's first
    u32 begin, end;
    u32 split_tile;                // number among the tiles that are split, where it is one
    bool complete;

    // Row tiles of a group change fastest: their activations stay in the L2 while weights stream by.
    __device__ __forceinline__ void locate(const PrefillArgs& args, u32 index) {
        const u32 group = index / (args.n_tiles * args.group), first = group * args.group;
        const u32 size = min(args.group, args.row_tiles - first), rest = index - args.n_tiles * first;
        n_tile = rest / size, row_tile = first + rest % size, shard = 0;
        while (shard + 1 < args.shard_count && n_tile >= args.shards[shard + 1].first_n_tile) ++shard;
        n_tile -= args.shards[shard].first_n_tile;
    }
};

// The work tiles of one cluster, one after the other.
struct PrefillScheduler {
    u32 tile, clusters, k_block, k_block_end;

    __device__ __forceinline__ PrefillScheduler(const PrefillArgs& args, u32 cluster, u32 count) : tile(cluster), clusters(count) {
        k_block = cluster < args.ranges ? range_begin(args, cluster) : 0;
        k_block_end = cluster < args.ranges ? range_begin(args, cluster + 1) : 0;
    }
    __device__ __forceinline__ bool next(const PrefillArgs& args, PrefillWorkTile& work) {
        const u32 depth = args.in_features / BLOCK_K;
        u32 index;
        if (tile < args.whole_tiles) {
            index = tile, tile += clusters;
            work.begin = 0, work.end = depth, work.complete = true;
        } else if (k_block < k_block_end) {
            work.split_tile = k_block / depth;
            work.begin = k_block - work.split_tile * depth;
            work.end = min(depth, work.begin + k_block_end - k_block);
            work.complete = work.end - work.begin == depth;
            index = args.whole_tiles + work.split_tile;
            k_block += work.end - work.begin;
        } else {
            return false;
        }
        work.locate(args, index);
        return true;
    }
};

// The channel of its k-tile that a word of matrix `matrix` of a k block's activations begins with; the word has the next one, too.
__device__ __forceinline__ constexpr u32 operand_channel(u32 matrix) { return matrix / 2 * 2 + matrix % 2 * 8; }

// The offset that products of byte sums leave out, for some activations as they are stored before signs are flipped: see base/codebook.cuh.
struct ComplementSum {
    float plain = 0.0f, complement = 0.0f;  // sums of activations

    // `flips`: the sign bits of the word that are flipped.
    __device__ __forceinline__ void add(u32 word, u32 flips) {
        const float low = half_to_float(u16(word)), high = half_to_float(u16(word >> 16));
        plain += flips & 0x8000u ? 0.0f : low, complement += flips & 0x8000u ? low : 0.0f;
        plain += flips >> 31 ? 0.0f : high, complement += flips >> 31 ? high : 0.0f;
    }
    __device__ __forceinline__ float offset() const { return BYTE_SUM_OFFSET * plain + (BYTE_SUM_OFFSET + COMPLEMENT_OFFSET) * complement; }
};

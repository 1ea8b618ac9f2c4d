// What a prefill launch is told, and how work is cut: mirrored field by field in vllm_exl3/cuda/prefill_arguments.py.
//
// A tile is one Hadamard block (128 output channels) × INSTANCE_TOKENS tokens; the blocks of a cluster take neighbouring
// Hadamard blocks of the same tokens, so that one copy brings the activations to all of them. A unit is 64 input channels.
// Clusters take whole tiles in turn; what does not fill them all is cut into ranges of units, one a cluster.
#pragma once
#include "codebook.cuh"
#include "problem.cuh"

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
    u32 first_strip;     // in the launch's list of strips: as many Hadamard blocks as a cluster has blocks; for gemm.cu two
    u32 complements;     // whether activations are stored for byte sums: see codebook.cuh, `complemented`
};

struct PrefillArgs {
    PrefillShard shards[MAX_SHARDS];
    const void* x;
    void* out;
    const void* bias;    // [sum of crop_size] or null
    u8* activations;     // scratch [shard][row tile][unit][8 matrices][tokens][16 bytes]
    float* scales;       // scratch [shard][rows]: what undoes the row's scale
    float* offsets;      // scratch [shard][rows][offset_parts]: what byte sums leave out, as parts of a sum, times the row's scale
    uint4* partials;     // scratch [2][ranges][Hadamard blocks of a strip][16 tokens][vectors of eight sums][256]: of parts of tiles, see prefill_sums.cuh; for gemm.cu float [2, or 1 with equal parts][ranges][2][tokens][128]
    u32* arrivals;       // scratch [cut tiles][Hadamard blocks of a strip]: see prefill_parts.cuh; null: a launch of its own ends cut tiles; for gemm.cu one a strip
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
    u32 strips;          // of all shards
    u32 group;           // row tiles that are multiplied while their activations stay in the L2
    u32 whole_tiles;     // tiles that one cluster computes from end to end
    u32 range_units;     // units of a range, and how many ranges hold one more
    u32 longer_ranges;
    u32 ranges;
    u32 stages;          // units that the ring holds
    u32 weight_bytes;    // of a unit in the ring, the widest kind's
    u32 strip_blocks;    // Hadamard blocks of a strip
    u32 block_rows;      // of a block of the transform: 1, 2, 4, 8 or 16
    u32 holds;           // whether the transform's blocks have shared memory for their rows
    u32 sharing;         // blocks of a cluster of prefill_rotate.cu or gemm_rotate.cu, which share their rows
    u32 equal_parts;     // gemm.cu: whether every strip is cut into equal parts, one a thread block
    u32 offset_parts;    // blocks of a cluster of gemm_rotate.cu, or Hadamard blocks of k where prefill_transform.cu takes its place
    u32 padding;         // to a multiple of 8 bytes
};

__device__ __forceinline__ u32 prefill_range_begin(const PrefillArgs& args, u32 range) {
    return range * args.range_units + min(range, args.longer_ranges);
}
__device__ __forceinline__ u32 prefill_range_of_unit(const PrefillArgs& args, u32 unit) {
    const u32 longer = args.longer_ranges * (args.range_units + 1);
    return unit < longer ? unit / (args.range_units + 1) : args.longer_ranges + (unit - longer) / args.range_units;
}

// Where a range leaves its sums of the tile whose units begin at `tile_begin`: it shares at most the tiles at its two ends.
template <class Parts>
__device__ __forceinline__ uint4* prefill_partials(const PrefillArgs& args, u32 range, u32 tile_begin, u32 place) {
    const u32 second = prefill_range_begin(args, range) < tile_begin ? 1 : 0;
    return args.partials + static_cast<u64>((second * args.ranges + range) * args.strip_blocks + place) * (args.tile_rows / 16 * Parts::VECTORS * 256);
}

// By a thread block of the kernel ahead of the GEMM.
__device__ __forceinline__ void clear_arrivals(const PrefillArgs& args) {
    if (args.arrivals == nullptr) return;
    const u32 count = (args.strips * args.row_tiles - args.whole_tiles) * args.strip_blocks;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) args.arrivals[i] = 0;
}

// A part of a tile: units [begin, end) of its k.
struct PrefillSegment {
    u32 shard, strip, row_tile;  // the strip counts from the shard's first
    u32 begin, end;
    u32 cut_tile;                // number among the tiles that are cut, where it is one
    bool complete;

    // Row tiles of a group change fastest: their activations stay in the L2 while weights stream by.
    __device__ __forceinline__ void locate(const PrefillArgs& args, u32 index) {
        const u32 group = index / (args.strips * args.group), first = group * args.group;
        const u32 size = min(args.group, args.row_tiles - first), rest = index - args.strips * first;
        strip = rest / size, row_tile = first + rest % size, shard = 0;
        while (shard + 1 < args.shard_count && strip >= args.shards[shard + 1].first_strip) ++shard;
        strip -= args.shards[shard].first_strip;
    }
};

// The segments of one cluster, one after the other.
struct PrefillWalk {
    u32 tile, clusters, unit, unit_end;

    __device__ __forceinline__ PrefillWalk(const PrefillArgs& args, u32 cluster, u32 count) : tile(cluster), clusters(count) {
        unit = cluster < args.ranges ? prefill_range_begin(args, cluster) : 0;
        unit_end = cluster < args.ranges ? prefill_range_begin(args, cluster + 1) : 0;
    }
    __device__ __forceinline__ bool next(const PrefillArgs& args, PrefillSegment& segment) {
        const u32 depth = args.in_features / UNIT_IN;
        u32 index;
        if (tile < args.whole_tiles) {
            index = tile, tile += clusters;
            segment.begin = 0, segment.end = depth, segment.complete = true;
        } else if (unit < unit_end) {
            segment.cut_tile = unit / depth;
            segment.begin = unit - segment.cut_tile * depth;
            segment.end = min(depth, segment.begin + unit_end - unit);
            segment.complete = segment.end - segment.begin == depth;
            index = args.whole_tiles + segment.cut_tile;
            unit += segment.end - segment.begin;
        } else {
            return false;
        }
        segment.locate(args, index);
        return true;
    }
};

// The channel of its k-tile that a word of matrix `matrix` of a unit's activations begins with; the word has the next one, too.
__device__ __forceinline__ constexpr u32 operand_channel(u32 matrix) { return matrix / 2 * 2 + matrix % 2 * 8; }

// What products of byte sums leave out, for some activations as they are stored before signs are flipped: see codebook.cuh.
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

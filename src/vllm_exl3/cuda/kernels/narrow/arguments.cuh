// Launch arguments of the narrow kernel, and how its work is partitioned. The host reads the declarations (cuda/declarations.py).
//
// Work is a list of k blocks. A k block is 128 input channels (one Hadamard block of k) × one n tile of output channels; k blocks of one
// n tile lie together with k rising, n tiles of one shard together. An n tile is 256·J channels, J tile columns for each of 16 warps.
// Every thread block takes a contiguous range: an equal part of one n tile (`splits` > 0), or an equal part of the whole list.
// That depends on (N, K, GPU) alone and so does the order of every sum. blockIdx.y is the tile of rows (tokens).
#pragma once
#include "base/ranges.cuh"
#include "base/shapes.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool WARPGROUPS = true;  // wgmma serves HALF
#else
constexpr bool WARPGROUPS = false;
#endif
constexpr u32 WARPS = 16;
constexpr u32 THREADS = 32 * WARPS;
constexpr u32 ROTATE_WARPS = 4, ROTATE_THREADS = 32 * ROTATE_WARPS;  // of the kernel that only rotates
constexpr u32 K_TILES = 8;   // k-tiles of a k block

// Fields that the first copy of weights needs lie in the first 64 bytes of constant memory that arguments take part in (they begin 16 bytes
// into it), what rotating needs in two more: every such line costs a launch a miss.
struct NarrowShard {
    const u8* trellis;
    u32 first_k_block;        // in the launch's list of k blocks,
    u32 end_k_block;          // and behind its last
    u32 out_features;      // stored, a multiple of 128
    u32 depth;             // Hadamard blocks of k
    u32 depth_inverse;     // see `fast_divide`
    u32 half_bits;
    const u16* suh;        // fp16 [128 * depth]
    const u16* svh;        // fp16 [out_features]
    u32 kind;              // index in the launch's list of kinds
    u32 first_n_tile;       // in the launch's list of n tiles
    u32 first_record;      // in a row tile's list of records
    u32 crop_start;        // first stored column that is returned
    u32 crop_size;
    u32 out_column;        // where its returned columns begin in the output
};

struct NarrowArgs {
    u32 splits;             // split-K: blocks that share an n tile; 0: stream-K over the whole list
    u32 splits_inverse;
    u32 range_k_blocks;       // k blocks of an n tile where splits > 0, else of a block's range,
    u32 longer_ranges;     // and how many ranges hold one more
    NarrowShard shards[MAX_SHARDS];
    void* out;
    const void* bias;      // [sum of crop_size] or null
    float* partials;       // scratch [row tile][partial sum of an n tile][row][channel]
    u32* counters;         // [row tile][n tile]: arrivals; zero before and after every launch
    const void* x;
    const uint4* records;  // scratch [row tile][record] of what the rotating kernel wrote, or null: rotate here
    i64 x_stride;          // elements
    u32 rows;
    u32 in_width;          // columns of x; the rest up to in_features counts as zero
    u32 x_type;
    u32 cached_k_blocks;        // k blocks whose activations shared memory holds at once,
    u32 cache_buffers;       // once, or twice: while one is multiplied, the next is fetched
    u32 record_bytes;      // the largest kind's
    u32 total_records;     // of a row tile: one a k block of k and shard
    u32 shard_count;
    i64 out_stride;
    u32 out_type;
    u32 bias_type;
    u32 n_tiles;
    u32 range_inverse;     // of range_k_blocks, and of one more
    u32 longer_inverse;
};

// n / d by d's inverse, 2^31 / d rounded up: exact where n·d < 2^31, to which plan_narrow holds a launch.
__device__ __forceinline__ u32 fast_divide(u32 n, u32 inverse) { return static_cast<u32>(static_cast<u64>(2 * n) * inverse >> 32); }

// n / d for n below 2^21, to which plan_narrow holds a launch's k blocks: n + 1/2 is at least 1/2 from a multiple of d, which what is
// rounded here does not reach. Several divisions by one divisor share its reciprocal; an integer division takes three times as
// long, and a launch of few tokens waits for a dozen.
__device__ __forceinline__ u32 quotient(u32 n, u32 d) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(static_cast<float>(d)));
    return static_cast<u32>((static_cast<float>(n) + 0.5f) * inverse);
}
__device__ __forceinline__ u32 remainder_of(u32 n, u32 d) { return n - quotient(n, d) * d; }

struct Range {
    u32 begin, end;

    __device__ __forceinline__ Range(const NarrowArgs& args, u32 block) {
        if (args.splits) {
            const u32 n_tile = fast_divide(block, args.splits_inverse), at = (block - n_tile * args.splits) * args.range_k_blocks;
            begin = n_tile * args.range_k_blocks + fast_divide(at, args.splits_inverse);
            end = n_tile * args.range_k_blocks + fast_divide(at + args.range_k_blocks, args.splits_inverse);
        } else {
            begin = range_begin(args, block);
            end = begin + args.range_k_blocks + (block < args.longer_ranges);
        }
    }
};
__device__ __forceinline__ u32 block_of_k_block(const NarrowArgs& args, u32 k_block) {
    const u32 longer = args.longer_ranges * (args.range_k_blocks + 1);
    return k_block < longer ? fast_divide(k_block, args.longer_inverse) : args.longer_ranges + fast_divide(k_block - longer, args.range_inverse);
}

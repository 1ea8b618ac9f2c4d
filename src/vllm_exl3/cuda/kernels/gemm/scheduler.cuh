// The tile scheduler of the GEMM for up to 128 tokens: k blocks, n tiles, ranges.
//
// An n tile is 256 output channels, two Hadamard blocks. A k block is 128 input channels of an n tile. K blocks of an n tile lie together with k
// rising, n tiles of a shard together, shards together; thread block b takes the contiguous range b of that list. Under split-K every
// n tile is divided into equal ranges, one a thread block; under stream-K the whole list is. That depends on (N, K, blocks) alone, and so does the order
// of every sum; the host chooses the blocks once for up to 48 tokens and once for more (gemm_plan.py).
#pragma once
#include "prefill/arguments.cuh"

constexpr u32 GEMM_BLOCK_N = 2 * HADAMARD_SIZE, GEMM_BLOCK_K = 2 * BLOCK_K;

// The k blocks [begin, end) of an n tile's k that a thread block multiplies.
struct GemmWorkTile {
    u32 shard, n_tile;  // the n tile counts from the shard's first
    u32 index;         // of the n tile in the launch
    u32 begin, end;
    bool complete;     // all of the n tile's k blocks
    bool last;         // the range ends with them

    // From `k_block` of the block's range on.
    __device__ __forceinline__ GemmWorkTile(const PrefillArgs& args, u32 k_block) {
        const u32 depth = args.in_features / GEMM_BLOCK_K, range_end = range_begin(args, blockIdx.x + 1);
        index = k_block / depth;
        begin = k_block - index * depth;
        end = min(depth, begin + range_end - k_block);
        complete = end - begin == depth;
        last = k_block + end - begin == range_end;
        shard = 0;
        while (shard + 1 < args.shard_count && index >= args.shards[shard + 1].first_n_tile) ++shard;
        n_tile = index - args.shards[shard].first_n_tile;
    }
};

// Calls `visit` with each work tile of the block's range.
template <class Visit>
__device__ __forceinline__ void for_each_work_tile(const PrefillArgs& args, const Visit& visit) {
    const u32 range_end = range_begin(args, blockIdx.x + 1);
#pragma unroll 1
    for (u32 k_block = range_begin(args, blockIdx.x); k_block < range_end;) {
        const GemmWorkTile work(args, k_block);
        visit(work);
        k_block += work.end - work.begin;
    }
}

// The parts of an n tile that several thread blocks multiplied, numbered from its first k on.
struct TileSplits {
    u32 first, count, mine;  // the first range that has one; how many have; which is this block's

    __device__ __forceinline__ TileSplits(const PrefillArgs& args, const GemmWorkTile& work) {
        const u32 depth = args.in_features / GEMM_BLOCK_K, begin = work.index * depth;
        first = range_of_k_block(args, begin), mine = blockIdx.x - first;
        count = range_of_k_block(args, begin + depth - 1) - first + 1;
    }
};

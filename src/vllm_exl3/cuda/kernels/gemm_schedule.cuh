// The tile scheduler of the GEMM for up to 128 tokens: k blocks, n tiles, ranges.
//
// An n tile is 256 output channels, two Hadamard blocks. A k block is 128 input channels of an n tile. K blocks of an n tile lie together with k
// rising, n tiles of a shard together, shards together; thread block b takes the contiguous range b of that list. Under split-K every
// n tile is divided into equal ranges, one a thread block; under stream-K the whole list is. That depends on (N, K, blocks) alone, and so does the order
// of every sum: the number of tokens does not enter.
#pragma once
#include "prefill_problem.cuh"

constexpr u32 GEMM_BLOCK_N = 2 * HADAMARD_SIZE, GEMM_BLOCK_K = 2 * BLOCK_K;

// The k blocks [begin, end) of an n tile's k that a thread block multiplies.
struct GemmWorkTile {
    u32 shard, n_tile;  // the n tile counts from the shard's first
    u32 index;         // of the n tile in the launch
    u32 begin, end;
    bool complete;
};

struct GemmScheduler {
    u32 k_block, k_block_end, depth;

    __device__ __forceinline__ explicit GemmScheduler(const PrefillArgs& args)
        : k_block(prefill_range_begin(args, blockIdx.x)), k_block_end(prefill_range_begin(args, blockIdx.x + 1)), depth(args.in_features / GEMM_BLOCK_K) {}

    __device__ __forceinline__ bool next(const PrefillArgs& args, GemmWorkTile& work) {
        if (k_block >= k_block_end) return false;
        work.index = k_block / depth;
        work.begin = k_block - work.index * depth;
        work.end = min(depth, work.begin + k_block_end - k_block);
        work.complete = work.end - work.begin == depth;
        work.shard = 0;
        while (work.shard + 1 < args.shard_count && work.index >= args.shards[work.shard + 1].first_n_tile) ++work.shard;
        work.n_tile = work.index - args.shards[work.shard].first_n_tile;
        k_block += work.end - work.begin;
        return true;
    }
};

// The parts of an n tile that several thread blocks multiplied, numbered from its first k on.
struct TileSplits {
    u32 first, count, mine;  // the first range that has one; how many have; which is this block's

    __device__ __forceinline__ TileSplits(const PrefillArgs& args, const GemmWorkTile& work) {
        const u32 depth = args.in_features / GEMM_BLOCK_K, begin = work.index * depth;
        first = prefill_range_of_k_block(args, begin), mine = blockIdx.x - first;
        count = prefill_range_of_k_block(args, begin + depth - 1) - first + 1;
    }
};

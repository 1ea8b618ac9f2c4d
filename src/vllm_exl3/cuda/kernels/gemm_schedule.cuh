// How the work of the GEMM for up to 128 tokens is divided: units, strips, ranges.
//
// A strip is 256 output channels, two Hadamard blocks. A unit is 128 input channels of a strip. Units of a strip lie together with k
// rising, strips of a shard together, shards together; thread block b takes the contiguous range b of that list. Either every strip is
// cut into equal parts, one a thread block, or the whole list is cut evenly. That depends on (N, K, blocks) alone, and so does the order
// of every sum: the number of tokens does not enter.
#pragma once
#include "prefill_problem.cuh"

constexpr u32 GEMM_STRIP = 2 * STRIP, GEMM_UNIT = 2 * UNIT_IN;

// The units [begin, end) of a strip's k that a thread block multiplies.
struct GemmSegment {
    u32 shard, strip;  // the strip counts from the shard's first
    u32 index;         // of the strip in the launch
    u32 begin, end;
    bool complete;
};

struct GemmWalk {
    u32 unit, unit_end, depth;

    __device__ __forceinline__ explicit GemmWalk(const PrefillArgs& args)
        : unit(prefill_range_begin(args, blockIdx.x)), unit_end(prefill_range_begin(args, blockIdx.x + 1)), depth(args.in_features / GEMM_UNIT) {}

    __device__ __forceinline__ bool next(const PrefillArgs& args, GemmSegment& segment) {
        if (unit >= unit_end) return false;
        segment.index = unit / depth;
        segment.begin = unit - segment.index * depth;
        segment.end = min(depth, segment.begin + unit_end - unit);
        segment.complete = segment.end - segment.begin == depth;
        segment.shard = 0;
        while (segment.shard + 1 < args.shard_count && segment.index >= args.shards[segment.shard + 1].first_strip) ++segment.shard;
        segment.strip = segment.index - args.shards[segment.shard].first_strip;
        unit += segment.end - segment.begin;
        return true;
    }
};

// The parts of a strip that several thread blocks multiplied, numbered from its first k on.
struct StripParts {
    u32 first, count, mine;  // the first range that has one; how many have; which is this block's

    __device__ __forceinline__ StripParts(const PrefillArgs& args, const GemmSegment& segment) {
        const u32 depth = args.in_features / GEMM_UNIT, begin = segment.index * depth;
        first = prefill_range_of_unit(args, begin), mine = blockIdx.x - first;
        count = prefill_range_of_unit(args, begin + depth - 1) - first + 1;
    }
};

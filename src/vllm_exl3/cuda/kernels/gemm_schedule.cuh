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
    bool complete;     // all of the strip's units
    bool last;         // the range ends with them

    // From `unit` of the block's range on.
    __device__ __forceinline__ GemmSegment(const PrefillArgs& args, u32 unit) {
        const u32 depth = args.in_features / GEMM_UNIT, range_end = prefill_range_begin(args, blockIdx.x + 1);
        index = unit / depth;
        begin = unit - index * depth;
        end = min(depth, begin + range_end - unit);
        complete = end - begin == depth;
        last = unit + end - begin == range_end;
        shard = 0;
        while (shard + 1 < args.shard_count && index >= args.shards[shard + 1].first_strip) ++shard;
        strip = index - args.shards[shard].first_strip;
    }
};

// Calls `visit` with each segment of the block's range.
template <class Visit>
__device__ __forceinline__ void for_each_segment(const PrefillArgs& args, const Visit& visit) {
    const u32 range_end = prefill_range_begin(args, blockIdx.x + 1);
#pragma unroll 1
    for (u32 unit = prefill_range_begin(args, blockIdx.x); unit < range_end;) {
        const GemmSegment segment(args, unit);
        visit(segment);
        unit += segment.end - segment.begin;
    }
}

// The value, of which the compiler computes nothing ahead of here: that would take registers beside products.
__device__ __forceinline__ u32 not_before(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

// The parts of a strip that several thread blocks multiplied, numbered from its first k on.
struct StripParts {
    u32 first, count, mine;  // the first range that has one; how many have; which is this block's

    __device__ __forceinline__ StripParts(const PrefillArgs& args, const GemmSegment& segment) {
        const u32 depth = args.in_features / GEMM_UNIT, begin = segment.index * depth;
        first = prefill_range_of_unit(args, begin), mine = blockIdx.x - first;
        count = prefill_range_of_unit(args, begin + depth - 1) - first + 1;
    }
};

// The list of k blocks of a launch, divided into contiguous ranges that are equal within one k block: `longer_ranges` of them hold one
// more than `range_k_blocks`.
#pragma once
#include "base/types.cuh"

template <class Args>
__device__ __forceinline__ u32 range_begin(const Args& args, u32 range) {
    return range * args.range_k_blocks + min(range, args.longer_ranges);
}
template <class Args>
__device__ __forceinline__ u32 range_of_k_block(const Args& args, u32 k_block) {
    const u32 longer = args.longer_ranges * (args.range_k_blocks + 1);
    return k_block < longer ? k_block / (args.range_k_blocks + 1) : args.longer_ranges + (k_block - longer) / args.range_k_blocks;
}

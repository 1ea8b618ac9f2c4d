// Sizes that kernels, plans and the layout of activations agree on.
#pragma once
#include "base/types.cuh"

constexpr int MAX_SHARDS = 8;                                  // of a launch
constexpr int HADAMARD_SIZE = 128;                             // channels of a Hadamard block
constexpr int BLOCK_K = 64;                                    // input channels of a k block
constexpr int PAIR_WARPS = 8, PAIR_THREADS = 32 * PAIR_WARPS;  // of two warpgroups that hold one Hadamard block, a tile column a warp
constexpr u32 ROW_PAD = 32;                                    // bytes after each k-tile's row of weights: the lanes' reads hit different banks
constexpr u32 OUTPUT_PITCH = HADAMARD_SIZE + 4;                // floats from one staged token to the next

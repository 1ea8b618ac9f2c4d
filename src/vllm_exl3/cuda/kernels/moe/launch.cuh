// How launches of the decode path begin: what does not come from the launch before is read ahead of the wait for it.
//
// Every thread of every launch waits before it ends and before it lets the next one begin. So when a launch begins, all but the
// one before it are over, and what those wrote, or what the op was given, may be read at once.
#pragma once
#include "base/launch.cuh"

__device__ __forceinline__ void begin_launch() {
    wait_on_dependent_grids();
    launch_dependent_grids();
}

// Brings a line of global memory from DRAM into the L2.
__device__ __forceinline__ void prefetch(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

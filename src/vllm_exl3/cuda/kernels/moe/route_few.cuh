// Sorting few slots by expert and listing their row blocks, one slot a thread, by comparing it with every other: what
// moe/route.cuh does without going over all experts. Where rows lie by slot.
#pragma once
#include "moe/route.cuh"

constexpr u32 FEW_SLOTS = 128;

// One block of at least FEW_SLOTS threads. Shared memory: experts and row blocks [FEW_SLOTS], and what they add up to.
__device__ __forceinline__ void route_few(const MoeArgs& args, u32* memory) {
    const u32 slots = args.slots, slot = threadIdx.x;
    u32 *experts = memory, *blocks = memory + FEW_SLOTS, *total = memory + 2 * FEW_SLOTS;
    // An expert that is elsewhere sorts behind all others.
    const u32 expert = slot < slots ? static_cast<u32>(expert_of(args, slot)) : NOWHERE;
    if (slot < slots) experts[slot] = expert;
    if (slot == 0) *total = 0;
    __syncthreads();
    u32 smaller = 0, same = 0, earlier = 0;
    if (expert != NOWHERE)
#pragma unroll 4
        for (u32 i = 0; i < slots; ++i) {
            const u32 other = experts[i];
            smaller += other < expert, same += other == expert, earlier += other == expert && i < slot;
        }
    const bool first = expert != NOWHERE && earlier == 0;
    const u32 tile = tile_rows(args, same), count = first ? (same + tile - 1) / tile : 0;
    if (slot < slots) blocks[slot] = count;
    __syncthreads();
    if (first) {
        u32 block = 0;
#pragma unroll 4
        for (u32 i = 0; i < slots; ++i) block += experts[i] < expert ? blocks[i] : 0;
        atomicMax(total, block + count);
        for (u32 row = 0; row < same; row += tile, ++block) args.blocks[block] = {expert, smaller + row, min(tile, same - row), 0};
    }
    if (expert != NOWHERE) args.sorted_slots[smaller + earlier] = slot;
    __syncthreads();
    if (slot == 0) args.list_sizes[0] = *total;
}

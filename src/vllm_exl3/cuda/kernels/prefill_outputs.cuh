// Ends tiles in warps of their own, while those that multiply go on to the next tile.
//
// Sums go through a ring of slots in shared memory, SLOT_TOKENS tokens each: with all of a tile's registers in use there is no
// room for a second tile's sums, but the warps that multiply are free as soon as the last slots hold theirs.
#pragma once
#include "barrier.cuh"
#include "prefill_epilogue.cuh"

constexpr u32 SLOT_TOKENS = 32, SLOTS = 4, ENDING_WARPS = 3;
constexpr u32 SLOT_BARRIERS = 256;  // where the slots' barriers begin in shared memory

struct SlotRing {
    u32 full, empty, count = 0;  // barriers, SLOTS of each sort; slots used so far

    __device__ __forceinline__ explicit SlotRing(u32 memory) : full(memory + SLOT_BARRIERS), empty(full + 8 * SLOTS) {}
    __device__ __forceinline__ void init() const {
        for (u32 i = 0; i < SLOTS; ++i) mbarrier_init(full + 8 * i, PAIR_WARPS), mbarrier_init(empty + 8 * i, ENDING_WARPS);
    }
    __device__ __forceinline__ u32 slot() const { return count % SLOTS; }
    __device__ __forceinline__ u32 phase() const { return count / SLOTS & 1; }
    __device__ __forceinline__ void wait_full() const { mbarrier_wait(full + 8 * slot(), phase()); }
    __device__ __forceinline__ void wait_empty() const { mbarrier_wait(empty + 8 * slot(), phase() ^ 1); }
    // After all lanes are done with the slot.
    __device__ __forceinline__ void pass(u32 barriers, int lane) {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(barriers + 8 * slot());
        ++count;
    }
};

// The multiplying warps' side.
template <class S, class Block>
__device__ __forceinline__ void hand_over(const float (&sums)[S::TOKENS / 2], Block& block, const PrefillSegment& segment) {
    const u32 rows = block.args.rows - segment.row_tile * S::TOKENS, staged = staged_place(block.staging, block.warp, block.lane);
    SlotRing& ring = block.slots;
#pragma unroll
    for (u32 first = 0; first < S::TOKENS; first += SLOT_TOKENS) {  // registers have no run-time index
        if (first >= rows) break;
        ring.wait_empty();
        stage_tokens<SLOT_TOKENS, 0>(sums + first / 2, staged + ring.slot() * (4 * SLOT_TOKENS * OUTPUT_PITCH));
        ring.pass(ring.full, block.lane);
    }
}

// The ending warps' side: warp `mine` of ENDING_WARPS, for all tiles of the block.
template <class S>
__device__ __forceinline__ void end_tiles(const PrefillArgs& args, SlotRing ring, Staging& staging, u32 place, u32 mine, int lane) {
    using Part = RowPart<32>;
    constexpr u32 threads = 32 * ENDING_WARPS, barrier = 4, parts = SLOT_TOKENS / Part::rows;
    const u32 thread = 32 * mine + lane;
    PrefillWalk walk(args, blockIdx.x / S::CLUSTER, gridDim.x / S::CLUSTER);
    PrefillSegment segment;
    wait_for_previous();
    while (walk.next(args, segment)) {
        if (!segment.complete || !has_block<S>(args, segment, place)) continue;
        const PrefillShard& shard = args.shards[segment.shard];
        const u32 strip = S::STRIPS * segment.strip + place, first_row = segment.row_tile * S::TOKENS;
        const u32 rows = min(u32(S::TOKENS), args.rows - first_row);
        sync_threads(barrier, threads);  // all have ended the tile before
        fetch_scales(args, staging, segment.shard, strip, first_row, rows, thread, threads);
        asm volatile("cp.async.wait_all;" ::: "memory");
        sync_threads(barrier, threads);
        for (u32 first = 0; first < rows; first += SLOT_TOKENS) {
            ring.wait_full();
#pragma unroll 1
            for (u32 i = 0; i < parts; ++i) {
                if ((ring.count * parts + i) % ENDING_WARPS != mine) continue;  // a slot has no whole share for everyone
                finish_part<Part>(args, staging, shard, strip, staging.row(ring.slot() * SLOT_TOKENS + i * Part::rows), first + i * Part::rows,
                                  first_row, rows, lane);
            }
            ring.pass(ring.empty, lane);
        }
    }
}

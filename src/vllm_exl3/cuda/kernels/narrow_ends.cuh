// Which block finishes a strip that several share.
//
// A block marks its pieces as MISSING when it begins, and counts itself after that. The one that counts last knows that all others of
// the strip are running or done: it may wait for their sums, whatever else the GPU does, and finishes the strip. Where there is much
// to do it tells the others, and each of them finishes a share; what those leave that had ended before, it takes over.
#pragma once
#include "narrow_finish.cuh"

// A strip that a block shares: the first block of it, and how many there are (0: no strip).
struct SharedStrip {
    Strip strip;
    u32 first, blocks;
    bool spread;  // whether every block finishes a share, or one does all
    u32 turn;
};

// Where a block's pieces lie, one after the other, in 16 bytes: up to the last of a strip that it shares.
struct BlockPieces {
    uint4* from;
    u32 count;
};

// Counts an arrival, from 0 to `last` and then from 0 again; gives the count before.
__device__ __forceinline__ u32 arrive(u32* counter, u32 last) {
    u32 before;
    asm volatile("atom.acquire.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
    return before;
}
// Sets a turn that is OPEN; gives what it was. No fence stands around it: pieces of third blocks were marked, fenced and counted before
// anybody set MINE, and who finds that reads them behind a branch on it, from the L2, where all of this took place.
__device__ __forceinline__ u32 decide(u32* turn, u32 wanted) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;" : "=r"(before) : "l"(turn), "r"(u32(OPEN)), "r"(wanted) : "memory");
    return before;
}
__device__ __forceinline__ u32 load_turn(const u32* at) {
    u32 word;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
    return word;
}

// The strips at the two ends of a block's range, where it shares them. One warp announces them before a barrier of the block.
template <int J, int TILE_ROWS>
struct StripEnds {
    static constexpr bool spreads = TILE_ROWS > 4;  // with fewer tokens there is too little to do
    static constexpr u32 announcer = WARPS - 1;
    SharedStrip (&ends)[2];  // shared memory
    BlockPieces& pieces;     // shared memory

    // Before the kernel ahead has ended.
    __device__ __forceinline__ void prepare(const NarrowArgs& args, int lane) const {
        const auto [begin, end] = Range(args, computed_here(blockIdx.x));
        const u32 stride = piece_stride<J>(args, TILE_ROWS) / 4;
        Strip strip{};
#pragma unroll 1
        for (u32 i = 0; i < 2; ++i) {
            strip.find(args, i ? end - 1 : begin, WARPS * J * 16);
            u32 first = blockIdx.x, blocks = args.parts;
            if (i ? strip.end_item <= end || strip.first_item <= begin : strip.first_item >= begin && strip.end_item <= end) {
                blocks = 0;
            } else if (blocks) {
                first = strip.index * blocks;
            } else {
                first = block_of_item(args, strip.first_item);
                blocks = block_of_item(args, strip.end_item - 1) - first + 1;
            }
            const u32 rows = min(static_cast<u32>(TILE_ROWS), args.rows - blockIdx.y * TILE_ROWS);
            const bool spread = spreads && rows * min(WARPS * J * 16, args.shards[strip.shard].out_features - strip.channel) > WARPS / 2 * BLOCK;
            if (lane == 0) {
                ends[i] = {strip, first, blocks, spread, OPEN};
                if (i == 0) pieces = {reinterpret_cast<uint4*>(piece_at<J>(args, piece_of(blockIdx.x, strip.index), TILE_ROWS)), 0};
                if (blocks) pieces.count = (strip.index - ends[0].strip.index + 1) * stride;
            }
        }
        __syncwarp();
    }
    // After it has. All but a few instructions of it have run before, as code that is fetched while weights stream in comes late.
    __device__ __forceinline__ void mark_missing(int lane) const {
        uint4* const from = pieces.from;
        const u32 count = pieces.count;
#pragma unroll 1
        for (u32 word = lane; word < count; word += 32) __stcg(from + word, uint4{MISSING, MISSING, MISSING, MISSING});
    }
    // After a barrier behind that.
    __device__ __forceinline__ void count(const NarrowArgs& args, int lane) const {
        if (lane < 2 && ends[lane].blocks) {
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
            SharedStrip& end = ends[lane];
            // Wraps to zero at the last arrival: the counter is ready for the next launch.
            const bool last = arrive(&args.counters[blockIdx.y * args.total_strips + end.strip.index], end.blocks - 1) == end.blocks - 1;
            end.turn = last ? LAST : end.spread ? OPEN : LEFT;
        }
        if constexpr (spreads) {
            __syncwarp();
#pragma unroll 1
            for (u32 i = 0; i < 2; ++i) {
                if (ends[i].blocks == 0 || ends[i].turn != LAST || !ends[i].spread) continue;
#pragma unroll 1
                for (u32 block = ends[i].first + lane; block < ends[i].first + ends[i].blocks; block += 32)
                    if (block != blockIdx.x) decide(turn_of(args, ends[i], block), MINE);
            }
        }
    }

    // After a piece is stored: finishes the strip where the block has it for itself. All threads of the block call it.
    __device__ __forceinline__ void add(const NarrowArgs& args, const Strip& strip, u32 warp, int lane) const {
        const Range range(args, computed_here(blockIdx.x));
        if (strip.first_item < range.begin || strip.end_item > range.end) return;
        __syncthreads();
        finish_tasks<J, TILE_ROWS>(args, strip, blockIdx.x, 1, warp, WARPS, nullptr, lane);
    }

    // After all pieces are stored.
    __device__ __forceinline__ void finish(const NarrowArgs& args, u32 warp, int lane) const {
        __syncthreads();  // what became of the announcement
        if (spreads && warp == announcer && lane < 2 && ends[lane].blocks && ends[lane].turn == OPEN)
            *static_cast<volatile u32*>(&ends[lane].turn) = decide(turn_of(args, ends[lane], blockIdx.x), LEFT) == OPEN ? LEFT : MINE;
#pragma unroll 1
        for (u32 i = 0; i < 2; ++i) {
            const SharedStrip& end = ends[i];
            const bool spread = spreads && end.spread;
            if (end.blocks == 0 || !spread && end.turn != LAST) continue;
            const volatile u32* turn = spread ? &end.turn : nullptr;
            u32 task = warp ^ i * (WARPS / 2), step = WARPS, share = 0;  // other warps begin with the second strip
            if (spread) task = task * end.blocks + blockIdx.x - end.first, step *= end.blocks;
            const bool takes_over = spread && warp == announcer - 1 && end.turn == LAST && any_left(args, end, lane);
            while (true) {
                finish_tasks<J, TILE_ROWS>(args, end.strip, end.first, end.blocks, task, step, turn, lane);
                if (!takes_over) break;
                while (share < end.blocks && load_turn(turn_of(args, end, end.first + share)) != LEFT) ++share;
                if (share == end.blocks) break;
                task = share++, step = end.blocks, turn = nullptr;
            }
        }
    }

private:
    static __device__ __forceinline__ u32* turn_of(const NarrowArgs& args, const SharedStrip& end, u32 block) {
        return turn_at<J>(args, piece_of(block, end.strip.index), TILE_ROWS);
    }
    // Whether blocks had ended before the last one began: it takes over their shares.
    static __device__ __forceinline__ bool any_left(const NarrowArgs& args, const SharedStrip& end, int lane) {
        bool left = false;
        for (u32 share = lane; share < end.blocks; share += 32) left |= load_turn(turn_of(args, end, end.first + share)) == LEFT;
        return __any_sync(0xffffffffu, left);
    }
};

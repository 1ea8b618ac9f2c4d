// Which block reduces an n tile that several blocks share.
//
// A block marks its partial sums as MISSING when it begins, and counts itself after that. The one that counts last knows that all others of
// the n tile are running or done: it may wait for their sums, whatever else the GPU does, and finishes the n tile. Where there is much
// to do it sets the others' roles, and each of them reduces a slice; it takes over the slices of those that had exited before.
#pragma once
#include "narrow/partials.cuh"

// An n tile that a block shares with others: the first block of it, and how many there are (0: no n tile).
struct SharedTile {
    NTile n_tile;
    u32 first, blocks;
    bool cooperative;  // whether every block finishes a slice, or one does all
    u32 role;
};

// Where a block's partial sums lie, one after the other, in 16 bytes: up to the last of an n tile that it shares.
struct BlockPartials {
    uint4* from;
    u32 count;
};

// Counts an arrival, from 0 to `last` and then from 0 again; gives the count before.
__device__ __forceinline__ u32 arrive(u32* counter, u32 last) {
    u32 before;
    asm volatile("atom.acquire.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
    return before;
}
// Sets a role that is UNDECIDED; returns the role before. No fence stands around it: partial sums of third blocks were marked, fenced and counted before
// anybody set REDUCES, and who finds that reads them behind a branch on it, from the L2, where all of this took place.
__device__ __forceinline__ u32 decide(u32* role, u32 wanted) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;" : "=r"(before) : "l"(role), "r"(u32(UNDECIDED)), "r"(wanted) : "memory");
    return before;
}
__device__ __forceinline__ u32 load_role(const u32* at) {
    u32 word;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
    return word;
}

// The n tiles at the two ends of a block's range, where it shares them. One warp announces them before a barrier of the block.
template <int J, int TILE_ROWS>
struct TileReduction {
    static constexpr bool may_cooperate = TILE_ROWS > 4;  // with fewer tokens there is too little to do
    static constexpr u32 leader = WARPS - 1;
    SharedTile (&tiles)[2];  // shared memory
    BlockPartials& partials;     // shared memory

    // Before the kernel ahead has ended.
    __device__ __forceinline__ void prepare(const NarrowArgs& args, int lane) const {
        const auto [begin, end] = Range(args, rematerialize(blockIdx.x));
        const u32 stride = partial_stride<J>(args, TILE_ROWS) / 4;
        NTile n_tile{};
#pragma unroll 1
        for (u32 i = 0; i < 2; ++i) {
            n_tile.find(args, i ? end - 1 : begin, WARPS * J * 16);
            u32 first = blockIdx.x, blocks = args.splits;
            if (i ? n_tile.end_k_block <= end || n_tile.first_k_block <= begin : n_tile.first_k_block >= begin && n_tile.end_k_block <= end) {
                blocks = 0;
            } else if (blocks) {
                first = n_tile.index * blocks;
            } else {
                first = block_of_k_block(args, n_tile.first_k_block);
                blocks = block_of_k_block(args, n_tile.end_k_block - 1) - first + 1;
            }
            const u32 rows = min(static_cast<u32>(TILE_ROWS), args.rows - blockIdx.y * TILE_ROWS);
            const bool cooperative = may_cooperate && rows * min(WARPS * J * 16, args.shards[n_tile.shard].out_features - n_tile.channel) > WARPS / 2 * HADAMARD_SIZE;
            if (lane == 0) {
                tiles[i] = {n_tile, first, blocks, cooperative, UNDECIDED};
                if (i == 0) partials = {reinterpret_cast<uint4*>(partial_at<J>(args, partial_of(blockIdx.x, n_tile.index), TILE_ROWS)), 0};
                if (blocks) partials.count = (n_tile.index - tiles[0].n_tile.index + 1) * stride;
            }
        }
        __syncwarp();
    }
    // After it has. All but a few instructions of it have run before, as code that is fetched while weights stream in comes late.
    __device__ __forceinline__ void mark_missing(int lane) const {
        uint4* const from = partials.from;
        const u32 count = partials.count;
#pragma unroll 1
        for (u32 word = lane; word < count; word += 32) __stcg(from + word, uint4{MISSING, MISSING, MISSING, MISSING});
    }
    // After a barrier behind that.
    __device__ __forceinline__ void count(const NarrowArgs& args, int lane) const {
        if (lane < 2 && tiles[lane].blocks) {
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
            SharedTile& tile = tiles[lane];
            // Wraps to zero at the last arrival: the counter is ready for the next launch.
            const bool last = arrive(&args.counters[blockIdx.y * args.n_tiles + tile.n_tile.index], tile.blocks - 1) == tile.blocks - 1;
            tile.role = last ? LAST_ARRIVAL : tile.cooperative ? UNDECIDED : EXITED;
        }
        if constexpr (may_cooperate) {
            __syncwarp();
#pragma unroll 1
            for (u32 i = 0; i < 2; ++i) {
                if (tiles[i].blocks == 0 || tiles[i].role != LAST_ARRIVAL || !tiles[i].cooperative) continue;
#pragma unroll 1
                for (u32 block = tiles[i].first + lane; block < tiles[i].first + tiles[i].blocks; block += 32)
                    if (block != blockIdx.x) decide(role_of(args, tiles[i], block), REDUCES);
            }
        }
    }

    // After a partial sum is stored: finishes the n tile where the block has it for itself. All threads of the block call it.
    __device__ __forceinline__ void add(const NarrowArgs& args, const NTile& n_tile, u32 warp, int lane) const {
        const Range range(args, rematerialize(blockIdx.x));
        if (n_tile.first_k_block < range.begin || n_tile.end_k_block > range.end) return;
        __syncthreads();
        reduce_tasks<J, TILE_ROWS>(args, n_tile, blockIdx.x, 1, warp, WARPS, nullptr, lane);
    }

    // After all partial sums are stored.
    __device__ __forceinline__ void finish(const NarrowArgs& args, u32 warp, int lane) const {
        __syncthreads();  // what became of the announcement
        if (may_cooperate && warp == leader && lane < 2 && tiles[lane].blocks && tiles[lane].role == UNDECIDED)
            *static_cast<volatile u32*>(&tiles[lane].role) = decide(role_of(args, tiles[lane], blockIdx.x), EXITED) == UNDECIDED ? EXITED : REDUCES;
#pragma unroll 1
        for (u32 i = 0; i < 2; ++i) {
            const SharedTile& tile = tiles[i];
            const bool cooperative = may_cooperate && tile.cooperative;
            if (tile.blocks == 0 || !cooperative && tile.role != LAST_ARRIVAL) continue;
            const volatile u32* role = cooperative ? &tile.role : nullptr;
            u32 task = warp ^ i * (WARPS / 2), step = WARPS, slice = 0;  // other warps begin with the second n tile
            if (cooperative) task = task * tile.blocks + blockIdx.x - tile.first, step *= tile.blocks;
            const bool takes_over = cooperative && warp == leader - 1 && tile.role == LAST_ARRIVAL && any_exited(args, tile, lane);
            while (true) {
                reduce_tasks<J, TILE_ROWS>(args, tile.n_tile, tile.first, tile.blocks, task, step, role, lane);
                if (!takes_over) break;
                while (slice < tile.blocks && load_role(role_of(args, tile, tile.first + slice)) != EXITED) ++slice;
                if (slice == tile.blocks) break;
                task = slice++, step = tile.blocks, role = nullptr;
            }
        }
    }

private:
    static __device__ __forceinline__ u32* role_of(const NarrowArgs& args, const SharedTile& tile, u32 block) {
        return role_at<J>(args, partial_of(block, tile.n_tile.index), TILE_ROWS);
    }
    // True where blocks had exited before the last one began: it takes over their slices.
    static __device__ __forceinline__ bool any_exited(const NarrowArgs& args, const SharedTile& tile, int lane) {
        bool left = false;
        for (u32 slice = lane; slice < tile.blocks; slice += 32) left |= load_role(role_of(args, tile, tile.first + slice)) == EXITED;
        return __any_sync(0xffffffffu, left);
    }
};

// Split-K reduction inside the GEMM: the clusters that multiplied parts of a tile reduce it, each a slice of its tokens.
//
// A tile's parts count in one word as they come to memory. A block that has no more to multiply waits until all parts of its tiles are
// there, adds them up for its slice in their order in k, and runs its epilogue. Blocks need not run at the same time: one that
// has waited for long releases its slice and exits, and the part that comes last, which waits for nobody, finds what was released
// before. One atomic word decides between the two, and no bit of a result depends on who finishes a slice.
//
// All of this comes behind the loop over work tiles: a branch in it that threads of a warp take differently costs the products
// a twentieth, since addresses are no longer known to be the same for a warp.
#pragma once
#include "base/cp_async.cuh"
#include "prefill/epilogue.cuh"

constexpr u32 STEP_TOKENS = 16, MAX_SLICES = 16;  // tokens that slices are multiples of; slices of a tile
constexpr u32 MAX_POLLS = 256;                      // looks at the word, a trip to the L2 each
constexpr u32 RELEASED = 16;                       // the word's bit of the first slice; below, it counts parts
constexpr u32 COUNT = (1u << RELEASED) - 1;

// A tile that is split, which part of it a range has, and what the block has to do about it.
struct SplitTile {
    u32 shard, n_tile, row_tile, rows;      // the n tile is the cluster's; rows of the tile
    u32 split_tile, begin;                   // its number among the split ones; its first k block
    u32 first, splits, split;                // the first range that has a part of it, and how many have; the range's
    u32 slices, steps;                     // that rows are divided into; steps of a slice
    u32 word;                              // what the tile's word was when the block's part came; then the slices that the block finishes

    __device__ __forceinline__ void find(const PrefillArgs& args, const PrefillWorkTile& work, u32 range) {
        const u32 depth = args.in_features / BLOCK_K;
        shard = work.shard, n_tile = work.n_tile, row_tile = work.row_tile, split_tile = work.split_tile;
        rows = min(args.tile_rows, args.rows - row_tile * args.tile_rows);
        begin = split_tile * depth, first = range_of_k_block(args, begin);
        splits = range_of_k_block(args, begin + depth - 1) - first + 1, split = range - first;
        const u32 all = (rows + STEP_TOKENS - 1) / STEP_TOKENS, most = min(splits, MAX_SLICES);
        steps = (all + most - 1) / most, slices = (all + steps - 1) / steps;
    }
    __device__ __forceinline__ u32* arrivals(const PrefillArgs& args, u32 place) const {
        return args.arrivals + split_tile * args.n_blocks + place;
    }
    // Says that the block's part is in memory. One thread, behind a barrier of those that left it.
    __device__ __forceinline__ void arrive(const PrefillArgs& args, u32 place) {
        u32 before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(arrivals(args, place)), "r"(1u) : "memory");
        word = before + 1;
    }
    // The slices that the block finishes, a bit each. One thread.
    __device__ __forceinline__ u32 slices_to_reduce(u32* arrivals) const {
        const u32 mine = split < slices ? 1u << split : 0;
        if ((word & COUNT) == splits) return mine | word >> RELEASED;
        if (mine == 0) return 0;
#pragma unroll 1
        for (u32 look = 0; look < MAX_POLLS; ++look) {
            u32 now;
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(arrivals) : "memory");
            if ((now & COUNT) >= splits) return mine;
        }
        u32 before;
        asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;" : "=r"(before) : "l"(arrivals), "r"(mine << RELEASED) : "memory");
        return (before & COUNT) == splits ? mine : 0;
    }
};

// The split tiles at the two ends of a block's range, in shared memory: the range's last first.
struct SplitTiles {
    u32 count, fetched;  // whether the first one's scales are in shared memory, since the range finishes with it
    SplitTile tiles[2];

    // By one thread, before anything is multiplied.
    __device__ __forceinline__ void find(const PrefillArgs& args, u32 range) {
        PrefillScheduler scheduler(args, range, 1);
        scheduler.tile = args.whole_tiles;
        PrefillWorkTile work;
        count = fetched = 0;
#pragma unroll 1
        while (scheduler.next(args, work)) {
            fetched = !work.complete;
            if (work.complete) continue;
            if (count == 1) tiles[1] = tiles[0];
            tiles[0].find(args, work, range), ++count;
        }
    }
};

// Reduces a slice, STEPS steps at a time, PARTS splits of them; the next ones are on their way meanwhile.
template <int STEPS, int PARTS, class Block>
__device__ __forceinline__ void reduce_slice(Block& block, const SplitTile& tile, u32 n_block, u32 slice) {
    using Part = RowPart<STAGED / 2>;
    const PrefillArgs& args = block.args;
    const u32 end = min((slice + 1) * tile.steps * STEP_TOKENS, tile.rows), mine = block.warp * Part::rows;
    const u32 staged = staged_place(block.staging, block.warp, block.lane);
    uint4 splits[PARTS][STEPS][1];
    float sums[8 * STEPS] = {};
    // Tokens and parts that are fetched next; the first of the tokens that are being added up.
    u32 first = slice * tile.steps * STEP_TOKENS, begin = 0, before = first;
#pragma unroll 1
    for (bool any = false;; any = true) {
        if (any) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
#pragma unroll
                for (int i = 0; i < STEPS; ++i) HalfPartials::add(sums + 8 * i, splits[p][i]);
        }
        if (first < end) {
#pragma unroll
            for (u32 p = 0; p < PARTS; ++p) {
                const uint4* from = prefill_partials<HalfPartials>(args, tile.first + min(begin + p, tile.splits - 1), tile.begin, block.place) +
                    first / STEP_TOKENS * PAIR_THREADS + block.thread;
#pragma unroll
                for (int i = 0; i < STEPS; ++i) {
                    splits[p][i][0] = make_uint4(0, 0, 0, 0);
                    if (begin + p < tile.splits && first + STEP_TOKENS * i < end) splits[p][i][0] = __ldcg(from + i * PAIR_THREADS);
                }
            }
        }
        if (any && begin == 0) {  // all parts of the tokens before have been added
#pragma unroll
            for (int i = 0; i < 8 * STEPS; ++i) sums[i] = HalfPartials::whole(sums[i]);
            block.sync();  // what was staged has been read
            stage_tokens<0, 2 * STEPS>(sums, staged);
            block.sync();
            if (mine < STEP_TOKENS * STEPS && before + mine < end)
                finish_part<Part>(args, block.staging, args.shards[tile.shard], n_block, block.staging.row(mine), before + mine,
                                  tile.row_tile * args.tile_rows, end, block.lane);
            if (first >= end) return;
            before = first;
#pragma unroll
            for (int i = 0; i < 8 * STEPS; ++i) sums[i] = 0.0f;
        }
        begin += PARTS;
        if (begin >= tile.splits) begin = 0, first += STEP_TOKENS * STEPS;
    }
}

// Reduces the block's slices of the tiles that its range has parts of.
template <class S, class Block>
__device__ __forceinline__ void reduce_splits(Block& block) {
    constexpr int STEPS = S::TOKENS / 64, PARTS = 8 / STEPS;
    const PrefillArgs& args = block.args;
    SplitTiles& split_tiles = block.split_tiles;
    const auto n_block_of = [&](const SplitTile& tile) { return S::N_BLOCKS * tile.n_tile + block.place; };
    const auto exists = [&](const SplitTile& tile) { return n_block_of(tile) < args.shards[tile.shard].out_features / HADAMARD_SIZE; };
    block.sync();  // all have left their sums
    if (block.thread == 0)
        for (u32 i = 0; i < split_tiles.count; ++i)
            if (exists(split_tiles.tiles[i])) split_tiles.tiles[i].arrive(args, block.place);
#pragma unroll 1
    for (u32 i = 0; i < split_tiles.count; ++i) {
        SplitTile& tile = split_tiles.tiles[i];
        if (!exists(tile)) continue;
        if (i > 0 || !split_tiles.fetched) {
            block.sync();  // the scales that are there have been read
            fetch_scales(args, block.staging, tile.shard, n_block_of(tile), tile.row_tile * args.tile_rows, tile.rows, block.thread, PAIR_THREADS);
            cp_async_wait_all();
        }
        if (block.thread == 0) tile.word = tile.slices_to_reduce(tile.arrivals(args, block.place));
        block.sync();
#pragma unroll 1
        for (u32 left = tile.word, slice = 0; left != 0; left >>= 1, ++slice)
            if (left & 1) reduce_slice<STEPS, PARTS>(block, tile, n_block_of(tile), slice);
    }
}

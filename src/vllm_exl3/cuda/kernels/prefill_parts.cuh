// Ends the tiles that several clusters have multiplied parts of, by these clusters: each ends a share of the tile's tokens.
//
// A tile's parts count in one word as they come to memory. Whoever has no more to multiply waits until all parts of its tiles are
// there, adds them up for its share in their order in k, and does all that follows. Blocks need not run at the same time: who
// has waited for long gives its share up and leaves, and the part that comes last, which waits for nobody, finds what was given
// up before. One atomic word decides between the two, and no bit of a result depends on who ends a share.
//
// All of this comes behind the loop over segments: a branch in it that threads of a warp take differently costs the products
// a twentieth, since addresses are no longer known to be the same for a warp.
#pragma once
#include "prefill_epilogue.cuh"

constexpr u32 STEP_TOKENS = 16, MOST_SHARES = 16;  // tokens that shares are multiples of; shares of a tile
constexpr u32 PATIENCE = 256;                      // looks at the word, a trip to the L2 each
constexpr u32 GIVEN_UP = 16;                       // the word's bit of the first share; below, it counts parts
constexpr u32 COUNT = (1u << GIVEN_UP) - 1;

// A tile that is cut, which part of it a range has, and what the block has to do about it.
struct CutTile {
    u32 shard, strip, row_tile, rows;      // the strip is the cluster's; rows of the tile
    u32 cut_tile, begin;                   // its number among the cut ones; its first unit
    u32 first, parts, part;                // the first range that has a part of it, and how many have; the range's
    u32 shares, steps;                     // that rows are divided into; steps of a share
    u32 word;                              // what the tile's word was when the block's part came; then the shares that the block ends

    __device__ __forceinline__ void find(const PrefillArgs& args, const PrefillSegment& segment, u32 range) {
        const u32 depth = args.in_features / UNIT_IN;
        shard = segment.shard, strip = segment.strip, row_tile = segment.row_tile, cut_tile = segment.cut_tile;
        rows = min(args.tile_rows, args.rows - row_tile * args.tile_rows);
        begin = cut_tile * depth, first = prefill_range_of_unit(args, begin);
        parts = prefill_range_of_unit(args, begin + depth - 1) - first + 1, part = range - first;
        const u32 all = (rows + STEP_TOKENS - 1) / STEP_TOKENS, most = min(parts, MOST_SHARES);
        steps = (all + most - 1) / most, shares = (all + steps - 1) / steps;
    }
    __device__ __forceinline__ u32* arrivals(const PrefillArgs& args, u32 place) const {
        return args.arrivals + cut_tile * args.strip_blocks + place;
    }
    // Says that the block's part is in memory. One thread, behind a barrier of those that left it.
    __device__ __forceinline__ void arrive(const PrefillArgs& args, u32 place) {
        u32 before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(arrivals(args, place)), "r"(1u) : "memory");
        word = before + 1;
    }
    // The shares that the block ends, a bit each. One thread.
    __device__ __forceinline__ u32 shares_to_end(u32* arrivals) const {
        const u32 mine = part < shares ? 1u << part : 0;
        if ((word & COUNT) == parts) return mine | word >> GIVEN_UP;
        if (mine == 0) return 0;
#pragma unroll 1
        for (u32 look = 0; look < PATIENCE; ++look) {
            u32 now;
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(arrivals) : "memory");
            if ((now & COUNT) >= parts) return mine;
        }
        u32 before;
        asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;" : "=r"(before) : "l"(arrivals), "r"(mine << GIVEN_UP) : "memory");
        return (before & COUNT) == parts ? mine : 0;
    }
};

// The cut tiles at the two ends of a block's range, in shared memory: the range's last first.
struct CutTiles {
    u32 count, fetched;  // whether the first one's scales are in shared memory, since the range ends with it
    CutTile tiles[2];

    // By one thread, before anything is multiplied.
    __device__ __forceinline__ void find(const PrefillArgs& args, u32 range) {
        PrefillWalk walk(args, range, 1);
        walk.tile = args.whole_tiles;
        PrefillSegment segment;
        count = fetched = 0;
#pragma unroll 1
        while (walk.next(args, segment)) {
            fetched = !segment.complete;
            if (segment.complete) continue;
            if (count == 1) tiles[1] = tiles[0];
            tiles[0].find(args, segment, range), ++count;
        }
    }
};

// Ends a share, STEPS steps at a time, PARTS parts of them; the next ones are on their way meanwhile.
template <int STEPS, int PARTS, class Block>
__device__ __forceinline__ void end_share(Block& block, const CutTile& tile, u32 strip, u32 share) {
    using Part = RowPart<STAGED / 2>;
    const PrefillArgs& args = block.args;
    const u32 end = min((share + 1) * tile.steps * STEP_TOKENS, tile.rows), mine = block.warp * Part::rows;
    const u32 staged = staged_place(block.staging, block.warp, block.lane);
    uint4 parts[PARTS][STEPS][1];
    float sums[8 * STEPS] = {};
    // Tokens and parts that are fetched next; the first of the tokens that are being added up.
    u32 first = share * tile.steps * STEP_TOKENS, begin = 0, before = first;
#pragma unroll 1
    for (bool any = false;; any = true) {
        if (any) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
#pragma unroll
                for (int i = 0; i < STEPS; ++i) HalfParts::add(sums + 8 * i, parts[p][i]);
        }
        if (first < end) {
#pragma unroll
            for (u32 p = 0; p < PARTS; ++p) {
                const uint4* from = prefill_partials<HalfParts>(args, tile.first + min(begin + p, tile.parts - 1), tile.begin, block.place) +
                    first / STEP_TOKENS * PAIR_THREADS + block.thread;
#pragma unroll
                for (int i = 0; i < STEPS; ++i) {
                    parts[p][i][0] = make_uint4(0, 0, 0, 0);
                    if (begin + p < tile.parts && first + STEP_TOKENS * i < end) parts[p][i][0] = __ldcg(from + i * PAIR_THREADS);
                }
            }
        }
        if (any && begin == 0) {  // all parts of the tokens before have been added
#pragma unroll
            for (int i = 0; i < 8 * STEPS; ++i) sums[i] = HalfParts::whole(sums[i]);
            block.sync();  // what was staged has been read
            stage_tokens<0, 2 * STEPS>(sums, staged);
            block.sync();
            if (mine < STEP_TOKENS * STEPS && before + mine < end)
                finish_part<Part>(args, block.staging, args.shards[tile.shard], strip, block.staging.row(mine), before + mine,
                                  tile.row_tile * args.tile_rows, end, block.lane);
            if (first >= end) return;
            before = first;
#pragma unroll
            for (int i = 0; i < 8 * STEPS; ++i) sums[i] = 0.0f;
        }
        begin += PARTS;
        if (begin >= tile.parts) begin = 0, first += STEP_TOKENS * STEPS;
    }
}

// Ends what the block has to of the tiles that its range has parts of.
template <class S, class Block>
__device__ __forceinline__ void end_parts(Block& block) {
    constexpr int STEPS = S::TOKENS / 64, PARTS = 8 / STEPS;
    const PrefillArgs& args = block.args;
    CutTiles& cut = block.cut;
    const auto strip_of = [&](const CutTile& tile) { return S::STRIPS * tile.strip + block.place; };
    const auto exists = [&](const CutTile& tile) { return strip_of(tile) < args.shards[tile.shard].out_features / STRIP; };
    block.sync();  // all have left their sums
    if (block.thread == 0)
        for (u32 i = 0; i < cut.count; ++i)
            if (exists(cut.tiles[i])) cut.tiles[i].arrive(args, block.place);
#pragma unroll 1
    for (u32 i = 0; i < cut.count; ++i) {
        CutTile& tile = cut.tiles[i];
        if (!exists(tile)) continue;
        if (i > 0 || !cut.fetched) {
            block.sync();  // the scales that are there have been read
            fetch_scales(args, block.staging, tile.shard, strip_of(tile), tile.row_tile * args.tile_rows, tile.rows, block.thread, PAIR_THREADS);
            asm volatile("cp.async.wait_all;" ::: "memory");
        }
        if (block.thread == 0) tile.word = tile.shares_to_end(tile.arrivals(args, block.place));
        block.sync();
#pragma unroll 1
        for (u32 left = tile.word, share = 0; left != 0; left >>= 1, ++share)
            if (left & 1) end_share<STEPS, PARTS>(block, tile, strip_of(tile), share);
    }
}

// From a work tile's sums to outputs: what byte sums leave out, the output Hadamard, the row's scale, svh, bias, crop and cast; and, where
// several thread blocks multiplied parts of a tile, how their partial sums come together.
//
// A partial tile lies in memory in the order of the accumulators, [8 tokens][thread]: a thread stores and loads 16 bytes that lie beside its
// neighbours', and no partial sum goes through shared memory. A word of the tile counts the partial tiles that are stored.
//
// Under split-K all blocks of an n tile are done at about the same time: each reduces a slice of the tokens and runs its
// epilogue (prefill/reduction.cuh says how a block that has waited in vain hands its slice over). Under stream-K, the block that
// has an n tile's first part comes to it last, when others' parts have mostly been there for long; whichever block comes last finishes the
// n tile, and nobody waits. Partial sums are added in the order of k, whichever block adds them.
//
// Sums that are complete go through shared memory, [token][channel], where the first step of the transform is done on the way (channels 8 apart
// lie in one thread). What follows needs no sums in registers.
#pragma once
#include "base/cp_async.cuh"
#include "base/barrier.cuh"
#include "gemm/output_row.cuh"
#include "gemm/scheduler.cuh"
#include "prefill/reduction.cuh"

constexpr u32 GEMM_CONSUMER_THREADS = 512;  // that multiply

// Tokens whose sums are in shared memory at once: a part of many, which leaves room for three k blocks in the pipeline and takes few registers.
template <int TOKENS> constexpr int staged_tokens = TOKENS > 112 ? TOKENS / 4 : TOKENS > 80 ? TOKENS / 2 : TOKENS;
template <int TOKENS> constexpr u32 gemm_staging_bytes = sizeof(Staging) + 4 * staged_tokens<TOKENS> * OUTPUT_PITCH;

// The state of a consumer.
struct GemmBlock {
    const PrefillArgs& args;
    Staging& staging;      // shared, of the pair of warpgroups that holds one Hadamard block
    const float* offsets;  // shared [shard][token], and the barrier that says that they are there
    u32 offsets_barrier;
    u32* words;            // shared: of the n tile that the range begins with, and of the one that it ends with
    u32 place;             // which Hadamard block of the n tile is the pair's
    int warp, lane, thread;  // in the pair

    __device__ __forceinline__ void sync() const { named_barrier_sync(1, GEMM_CONSUMER_THREADS); }
    __device__ __forceinline__ void sync_pair() const { named_barrier_sync(2 + place, PAIR_THREADS); }
    __device__ __forceinline__ bool leads() const { return place == 0 && thread == 0; }
    __device__ __forceinline__ u32 hadamard_block(const GemmWorkTile& work) const { return 2 * work.n_tile + place; }
};

// Starts to load the operands of a work tile's epilogue, whose readers wait for the copies and for the block.
template <int TOKENS>
__device__ __forceinline__ void load_epilogue_operands(const GemmBlock& block, const GemmWorkTile& work) {
    fetch_scales(block.args, block.staging, work.shard, block.hadamard_block(work), 0, TOKENS, block.thread, PAIR_THREADS);
}

// Sums the offsets of the rows of each shard that the block's range touches, by `threads` threads, which then arrive at `barrier`.
__device__ __forceinline__ void sum_offsets(const PrefillArgs& args, float* offsets, u32 tokens, u32 thread, u32 threads, u32 barrier) {
    u32 done = ~0u;
    for_each_work_tile(args, [&](const GemmWorkTile& work) {
        if (work.shard == done) return;
        done = work.shard;
        const bool needed = args.shards[done].complements;
        for (u32 row = thread; row < tokens; row += threads) {
            float sum = 0.0f;
            if (needed && row < args.rows) {
                const float* from = args.offsets + static_cast<u64>(done * args.rows + row) * args.offset_parts;
#pragma unroll 4
                for (u32 i = 0; i < args.offset_parts; ++i) sum += __ldcg(from + i);
            }
            offsets[done * tokens + row] = sum;
        }
    });
    mbarrier_arrive(barrier);
}

// Puts a thread's sums of eight tokens in shared memory: accumulators d of row `token` and of those behind it.
__device__ __forceinline__ void stage_group(const float* d, const GemmBlock& block, u32 token) {
    float* row = block.staging.row(token + 2 * (block.lane & 3)) + 16 * block.warp + (block.lane >> 2);
    row[0] = d[0] + d[2], row[8] = d[0] - d[2], row[OUTPUT_PITCH] = d[1] + d[3], row[OUTPUT_PITCH + 8] = d[1] - d[3];
}
// The thread's place in the partial tile that a range has of an n tile: a range has partial tiles of at most two n tiles.
template <int TOKENS>
__device__ __forceinline__ float4* partial_tile(const GemmBlock& block, const GemmWorkTile& work, u32 range) {
    const PrefillArgs& args = block.args;
    const u32 second = range_begin(args, range) < work.index * (args.in_features / GEMM_BLOCK_K) ? 1 : 0;
    return reinterpret_cast<float4*>(args.partials) + static_cast<u64>(second * args.ranges + range) * (TOKENS / 8 * GEMM_CONSUMER_THREADS) + block.place * PAIR_THREADS + block.thread;
}

// Stores the block's partial tile.
template <int TOKENS, class Sum>
__device__ __forceinline__ void store_partial(const Sum (&sums)[TOKENS / 2], const GemmBlock& block, const GemmWorkTile& work) {
    float4* to = partial_tile<TOKENS>(block, work, blockIdx.x);
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
        const Sum* d = sums + 4 * i;
        if (8 * i < block.args.rows) __stcg(to + i * GEMM_CONSUMER_THREADS, make_float4(float(d[0]), float(d[1]), float(d[2]), float(d[3])));
    }
}
// Counts the block's partial tile, which it has stored; `word` becomes the number of those that were there before.
__device__ __forceinline__ void count_partial(const GemmBlock& block, const GemmWorkTile& work, u32* word) {
    block.sync();
    if (block.leads()) {
        u32 before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(block.args.arrivals + work.index), "r"(1u) : "memory");
        *word = before;
    }
}

// An n tile whose sums come together in the block.
struct EpilogueWork {
    GemmWorkTile work;
    u32 first, splits, own;  // the first range that has a partial tile; how many have; which of them is the block's
    float scale;            // from sums of products to sums of products of weights

    __device__ __forceinline__ EpilogueWork(const GemmBlock& block, const GemmWorkTile& work, bool bytes)
        : work(work), first(blockIdx.x), splits(1), own(0),
          scale(bytes ? BYTE_STEP : block.args.shards[work.shard].complements ? BYTE_SUM_SCALE : 1.0f) {
        if (work.complete) return;
        const TileSplits all(block.args, work);
        first = all.first, splits = all.count, own = all.mine;
    }
};

// Transforms and stores the tokens [first, first + count) of an n tile, whose sums are staged.
//
// This code runs once or twice in a launch, and instructions that come from memory while weights stream in take longer than they run: a short
// loop over rows, two of a warp at a time, is faster than one pass with all of them in registers.
__device__ __forceinline__ void finish_rows(const GemmBlock& block, const EpilogueWork& epilogue, u32 shard_tokens, u32 first, u32 count) {
    const PrefillArgs& args = block.args;
    const PrefillShard& shard = args.shards[epilogue.work.shard];
    const RowOfLane lanes(block.lane);
    const u32 hadamard_block = block.hadamard_block(epilogue.work);
    if (hadamard_block >= shard.out_features / HADAMARD_SIZE) return;
    const Crop crop(args, shard, hadamard_block);
    const float* offsets = block.offsets + epilogue.work.shard * shard_tokens;
#pragma unroll 1
    for (u32 row = 2 * block.warp; row < count; row += 2 * PAIR_WARPS) {
        const u32 in_window = min(row + lanes.row, count - 1), token = first + in_window;
        float* staged = block.staging.row(in_window);
        float v[8] = {};
        lanes.add(v, staged);
        lanes.rotate(v, block.lane);
        // A constant added to all channels before the transform is 128 times that, added to the first.
        if (lanes.channel == 0) v[0] += offsets[token] * (HADAMARD_SIZE / epilogue.scale);
        lanes.scale(v, HADAMARD_SCALE * epilogue.scale, block.staging.descale[token], block.staging.svh);
        if (args.bias != nullptr) lanes.add(v, block.staging.bias);
        if (crop.whole) {
            if (row + lanes.row < count) lanes.store(v, args, crop.place(args, token));
        } else {
            __syncwarp();
            lanes.store_shared_row(v, staged);  // of a last odd row twice the same
            __syncwarp();
            crop.store(args, block.staging.row(row), min(2u, count - row), first + row, block.lane);
            __syncwarp();
        }
    }
}

// Waits for what load_epilogue_operands has started and for the offsets. A barrier of the block comes before anything is read.
__device__ __forceinline__ void wait_for_scales(const GemmBlock& block) {
    cp_async_wait_all();
    mbarrier_wait(block.offsets_barrier, 0);
}

__device__ __forceinline__ void add_vector(float* d, const float4* from) {
    const float4 v = __ldcg(from);
    d[0] += v.x, d[1] += v.y, d[2] += v.z, d[3] += v.w;
}

// Adds the partial tiles of an n tile, but the one of number `own`, in the order of k: of the tokens from FIRST on that are staged at once.
template <int TOKENS, int FIRST>
__device__ __forceinline__ void add_partials(float (&sums)[staged_tokens<TOKENS> / 2], const GemmBlock& block, const EpilogueWork& epilogue, u32 own) {
#pragma unroll 1
    for (u32 split = 0; split < epilogue.splits; ++split) {
        if (split == own) continue;
        const float4* from = partial_tile<TOKENS>(block, epilogue.work, epilogue.first + split) + FIRST / 8 * GEMM_CONSUMER_THREADS;
#pragma unroll
        for (int i = 0; i < staged_tokens<TOKENS> / 8; ++i)
            if (FIRST + 8 * i < block.args.rows) add_vector(sums + 4 * i, from + i * GEMM_CONSUMER_THREADS);
    }
}

// Finishes an n tile: of the tokens from FIRST on that are staged at once, and then of the rest. PARTIALS: sums are added to what other blocks have
// stored; with `own` beyond the splits all of them are read from memory.
template <int TOKENS, bool PARTIALS, int FIRST = 0, class Sum>
__device__ __forceinline__ void finish_n_tile(const Sum (&sums)[TOKENS / 2], const GemmBlock& block, const EpilogueWork& epilogue, u32 own = 0) {
    constexpr int STAGED = staged_tokens<TOKENS>;
    if constexpr (FIRST == 0) wait_for_scales(block);
    float totals[STAGED / 2];
#pragma unroll
    for (int i = 0; i < STAGED / 2; ++i) totals[i] = PARTIALS && own >= epilogue.splits ? 0.0f : float(sums[FIRST / 2 + i]);
    if constexpr (PARTIALS) add_partials<TOKENS, FIRST>(totals, block, epilogue, own);
#pragma unroll
    for (int i = 0; i < STAGED / 8; ++i) stage_group(totals + 4 * i, block, 8 * i);
    block.sync();
    if (FIRST < block.args.rows) finish_rows(block, epilogue, TOKENS, FIRST, min(u32(STAGED), block.args.rows - FIRST));
    block.sync();  // the next sums and scales go where these are
    if constexpr (FIRST + STAGED < TOKENS) finish_n_tile<TOKENS, PARTIALS, FIRST + STAGED>(sums, block, epilogue, own);
}

// True where all other partial tiles are there of the n tile that the block's range ends with, under stream-K. If not, or if there
// are several others, the block's own has been stored.
template <int TOKENS, class Sum>
__device__ __forceinline__ bool claim_tile(const Sum (&sums)[TOKENS / 2], const GemmBlock& block, const EpilogueWork& epilogue) {
    u32* word = block.words + 1;
    if (block.leads()) {
        u32 now;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(block.args.arrivals + epilogue.work.index) : "memory");
        *word = now;
    }
    block.sync();
    const bool there = *word == epilogue.splits - 1;
    if (!there || epilogue.splits > 2) store_partial<TOKENS>(sums, block, epilogue.work);
    if (there) return true;
    count_partial(block, epilogue.work, word);  // behind a barrier: all have read the word
    block.sync();
    return *word == epilogue.splits - 1;
}

// Finishes the n tile that the block's range ends with, under stream-K, if all other partial tiles are there.
template <int TOKENS, class Sum>
__device__ __forceinline__ void finish_last_n_tile(const Sum (&sums)[TOKENS / 2], const GemmBlock& block, const EpilogueWork& epilogue) {
    if (!claim_tile<TOKENS>(sums, block, epilogue)) return;
    // The order of more than two terms matters: the block's own comes in its place, as it was stored.
    finish_n_tile<TOKENS, true>(sums, block, epilogue, epilogue.splits > 2 ? ~0u : epilogue.own);
}

// Finishes the n tile that the block's range begins with, whose partial tile it has stored before, if that was the last one.
template <int TOKENS, class List>
__device__ __forceinline__ void finish_first(const GemmBlock& block) {
    cp_async_wait_all();  // what was fetched for the last n tile, if it was not finished here
    block.sync();  // the word is there
    const GemmWorkTile work(block.args, range_begin(block.args, blockIdx.x));
    const EpilogueWork epilogue(block, work, List::bytes);
    if (*block.words != epilogue.splits - 1) return;
    load_epilogue_operands<TOKENS>(block, work);
    const float none[TOKENS / 2] = {};
    finish_n_tile<TOKENS, true>(none, block, epilogue, ~0u);
}

// Split-K: stores the block's partial tile, and reduces its slice of the tokens: eight at least, as accumulators have them.
template <int TOKENS, class Sum>
__device__ __forceinline__ void reduce_slices(const Sum (&sums)[TOKENS / 2], const GemmBlock& block, const EpilogueWork& epilogue) {
    const u32 groups = (block.args.rows + 7) / 8, most = min(epilogue.splits, MAX_SLICES), slice_groups = (groups + most - 1) / most;
    store_partial<TOKENS>(sums, block, epilogue.work);
    count_partial(block, epilogue.work, block.words);
    if (block.leads()) {
        SplitTile tile;
        tile.split = epilogue.own, tile.splits = epilogue.splits, tile.slices = (groups + slice_groups - 1) / slice_groups;
        tile.word = *block.words + 1;
        *block.words = tile.slices_to_reduce(block.args.arrivals + epilogue.work.index);
    }
    wait_for_scales(block);
    block.sync();
#pragma unroll 1
    for (u32 slices = *block.words; slices != 0; slices &= slices - 1) {
        const u32 first = (__ffs(slices) - 1) * slice_groups, end = min(groups, first + slice_groups);
#pragma unroll 1
        for (u32 group = first; group < end; group += 2) {
            const bool both = TOKENS > 8 && group + 1 < end;
            float d[2][4] = {};
#pragma unroll 4
            for (u32 split = 0; split < epilogue.splits; ++split) {
                const float4* from = partial_tile<TOKENS>(block, epilogue.work, epilogue.first + split) + group * GEMM_CONSUMER_THREADS;
                add_vector(d[0], from);
                if (both) add_vector(d[1], from + GEMM_CONSUMER_THREADS);
            }
            stage_group(d[0], block, 0);
            if (both) stage_group(d[1], block, 8);
            block.sync_pair();
            finish_rows(block, epilogue, TOKENS, 8 * group, min(both ? 16u : 8u, block.args.rows - 8 * group));
            block.sync_pair();
        }
    }
}

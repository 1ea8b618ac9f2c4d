// From a segment's sums to outputs: what byte sums leave out, the output Hadamard, the row's scale, svh, bias, crop and cast; and, where
// several thread blocks multiplied parts of a tile, how their partial sums come together.
//
// A partial tile lies in memory in the order of the accumulators, [8 tokens][thread]: a thread stores and loads 16 bytes that lie beside its
// neighbours', and no partial sum goes through shared memory. A word of the tile counts the partial tiles that are stored.
//
// Where every strip was cut into equal parts, all its blocks are done at about the same time: each sums and finishes a share of the
// tokens (prefill_parts.cuh says how a block that has waited in vain hands its share over). Where the list of units was cut evenly, the block that
// has a strip's first part comes to it last, when others' parts have mostly been there for long; whichever block comes last finishes the
// strip, and nobody waits. Partial sums are added in the order of k, whoever adds them.
//
// Sums that are complete go through shared memory, [token][channel], where the first step of the transform is done on the way (channels 8 apart
// lie in one thread). What follows needs no sums in registers.
#pragma once
#include "barrier.cuh"
#include "gemm_schedule.cuh"
#include "prefill_parts.cuh"

constexpr u32 GEMM_THREADS = 512;  // that multiply

constexpr float BYTE_STEP = 4.0f * MUL1_SCALE_18 / 262144.0f;  // what one step of a weight of int8 stands for

// Tokens whose sums are in shared memory at once: a part of many, which leaves room for three units in the ring and takes few registers.
template <int TOKENS> constexpr int staged_tokens = TOKENS > 112 ? TOKENS / 4 : TOKENS > 80 ? TOKENS / 2 : TOKENS;
template <int TOKENS> constexpr u32 gemm_staging_bytes = sizeof(Staging) + 4 * staged_tokens<TOKENS> * OUTPUT_PITCH;

// What the warps that multiply know.
struct GemmBlock {
    const PrefillArgs& args;
    Staging& staging;      // shared, of the pair of warpgroups that holds one Hadamard block
    const float* offsets;  // shared [shard][token], and the barrier that says that they are there
    u32 offsets_there;
    u32* words;            // shared: of the strip that the range begins with, and of the one that it ends with
    u32 place;             // which Hadamard block of the strip is the pair's
    int warp, lane, thread;  // in the pair

    __device__ __forceinline__ void sync() const { sync_threads(1, GEMM_THREADS); }
    __device__ __forceinline__ void sync_pair() const { sync_threads(2 + place, PAIR_THREADS); }
    __device__ __forceinline__ bool leads() const { return place == 0 && thread == 0; }
    __device__ __forceinline__ u32 hadamard_block(const GemmSegment& segment) const { return 2 * segment.strip + place; }
};

// Starts to fetch what the end of a segment needs. Whatever reads it waits for copies, and for the block.
template <int TOKENS>
__device__ __forceinline__ void fetch_for_end(const GemmBlock& block, const GemmSegment& segment) {
    fetch_scales(block.args, block.staging, segment.shard, block.hadamard_block(segment), 0, TOKENS, block.thread, PAIR_THREADS);
}

// Sums the offsets of the rows of each shard that the block's range touches, by `threads` threads, which then arrive at `barrier`.
__device__ __forceinline__ void sum_offsets(const PrefillArgs& args, float* offsets, u32 tokens, u32 thread, u32 threads, u32 barrier) {
    u32 done = ~0u;
    for_each_segment(args, [&](const GemmSegment& segment) {
        if (segment.shard == done) return;
        done = segment.shard;
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
// The thread's place in the partial tile that a range has of a strip: a range has partial tiles of at most two strips.
template <int TOKENS>
__device__ __forceinline__ float4* partial_tile(const GemmBlock& block, const GemmSegment& segment, u32 range) {
    const PrefillArgs& args = block.args;
    const u32 second = prefill_range_begin(args, range) < segment.index * (args.in_features / GEMM_UNIT) ? 1 : 0;
    return reinterpret_cast<float4*>(args.partials) + static_cast<u64>(second * args.ranges + range) * (TOKENS / 8 * GEMM_THREADS) + block.place * PAIR_THREADS + block.thread;
}

// Stores the block's partial tile.
template <int TOKENS, class Sum>
__device__ __forceinline__ void store_partial(const Sum (&sums)[TOKENS / 2], const GemmBlock& block, const GemmSegment& segment) {
    float4* to = partial_tile<TOKENS>(block, segment, blockIdx.x);
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
        const Sum* d = sums + 4 * i;
        if (8 * i < block.args.rows) __stcg(to + i * GEMM_THREADS, make_float4(float(d[0]), float(d[1]), float(d[2]), float(d[3])));
    }
}
// Counts the block's partial tile, which it has stored; `word` becomes the number of those that were there before.
__device__ __forceinline__ void count_part(const GemmBlock& block, const GemmSegment& segment, u32* word) {
    block.sync();
    if (block.leads()) {
        u32 before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(block.args.arrivals + segment.index), "r"(1u) : "memory");
        *word = before;
    }
}

// A strip whose sums come together in the block.
struct Ending {
    GemmSegment segment;
    u32 first, parts, own;  // the first range that has a partial tile; how many have; which of them is the block's
    float scale;            // from sums of products to sums of products of weights

    __device__ __forceinline__ Ending(const GemmBlock& block, const GemmSegment& segment, bool bytes)
        : segment(segment), first(blockIdx.x), parts(1), own(0),
          scale(bytes ? BYTE_STEP : block.args.shards[segment.shard].complements ? BYTE_SUM_SCALE : 1.0f) {
        if (segment.complete) return;
        const StripParts all(block.args, segment);
        first = all.first, parts = all.count, own = all.mine;
    }
};

// A lane's eight channels of a row, 4·i .. 4·i+3 and the same behind channel 64: half a warp has a row, and a warp two.
struct RowOfLane {
    u32 row, channel;

    __device__ __forceinline__ explicit RowOfLane(int lane) : row(lane / 16), channel(4 * (lane % 16)) {}

    __device__ __forceinline__ void add(float (&v)[8], const float* from) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float4 values = *reinterpret_cast<const float4*>(from + channel + 64 * half);
            v[4 * half] += values.x, v[4 * half + 1] += values.y, v[4 * half + 2] += values.z, v[4 * half + 3] += values.w;
        }
    }
    // The transform, but for the step of channel bit 3.
    __device__ __forceinline__ static void rotate(float (&v)[8], int lane) {
        butterflies<1>(v);
#pragma unroll
        for (u32 step = 1; step < 16; step *= 2) {
            if (step == 2) continue;
            const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xffffffffu, v[i], step));
        }
    }
    // `undo` may be as large as an activation: it comes last, so that nothing overflows before.
    __device__ __forceinline__ void scale(float (&v)[8], float factor, float undo, const u16* svh) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint2 raw = *reinterpret_cast<const uint2*>(svh + channel + 64 * half);
            const u32 words[2] = {raw.x, raw.y};
#pragma unroll
            for (int i = 0; i < 4; ++i) v[4 * half + i] = v[4 * half + i] * factor * half_to_float(u16(words[i / 2] >> 16 * (i & 1))) * undo;
        }
    }
    __device__ __forceinline__ void keep(const float (&v)[8], float* to) const {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<float4*>(to + channel + 64 * half) = make_float4(v[4 * half], v[4 * half + 1], v[4 * half + 2], v[4 * half + 3]);
    }
    // To a row of the output that begins at `first`, which is aligned.
    __device__ __forceinline__ void store(const float (&v)[8], const PrefillArgs& args, i64 first) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* d = v + 4 * half;
            const i64 at = first + channel + 64 * half;
            if (args.out_type == F32) {
                *reinterpret_cast<float4*>(static_cast<float*>(args.out) + at) = make_float4(d[0], d[1], d[2], d[3]);
                continue;
            }
            u32 words[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if (args.out_type == F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[j]) : "f"(d[2 * j + 1]), "f"(d[2 * j]));
                else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[j]) : "f"(d[2 * j + 1]), "f"(d[2 * j]));
            }
            *reinterpret_cast<uint2*>(static_cast<u16*>(args.out) + at) = make_uint2(words[0], words[1]);
        }
    }
};

// Transforms and stores the tokens [first, first + count) of a strip, whose sums are staged.
//
// This code runs once or twice in a launch, and instructions that come from memory while weights stream in take longer than they run: a short
// loop over rows, two of a warp at a time, is faster than one pass with all of them in registers.
__device__ __forceinline__ void finish_rows(const GemmBlock& block, const Ending& ending, u32 shard_tokens, u32 first, u32 count) {
    const PrefillArgs& args = block.args;
    const PrefillShard& shard = args.shards[ending.segment.shard];
    const RowOfLane lanes(block.lane);
    const u32 hadamard_block = block.hadamard_block(ending.segment);
    if (hadamard_block >= shard.out_features / STRIP) return;
    const Crop crop(args, shard, hadamard_block);
    const float* offsets = block.offsets + ending.segment.shard * shard_tokens;
#pragma unroll 1
    for (u32 row = 2 * block.warp; row < count; row += 2 * PAIR_WARPS) {
        const u32 in_window = min(row + lanes.row, count - 1), token = first + in_window;
        float* staged = block.staging.row(in_window);
        float v[8] = {};
        lanes.add(v, staged);
        lanes.rotate(v, block.lane);
        // A constant added to all channels before the transform is 128 times that, added to the first.
        if (lanes.channel == 0) v[0] += offsets[token] * (STRIP / ending.scale);
        lanes.scale(v, HADAMARD_SCALE * ending.scale, block.staging.undo[token], block.staging.svh);
        if (args.bias != nullptr) lanes.add(v, block.staging.bias);
        if (crop.whole) {
            if (row + lanes.row < count) lanes.store(v, args, crop.place(args, token));
        } else {
            __syncwarp();
            lanes.keep(v, staged);  // of a last odd row twice the same
            __syncwarp();
            crop.store(args, block.staging.row(row), min(2u, count - row), first + row, block.lane);
            __syncwarp();
        }
    }
}

// Waits for what fetch_for_end has started and for the offsets. A barrier of the block comes before anything is read.
__device__ __forceinline__ void wait_for_scales(const GemmBlock& block) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    mbarrier_wait(block.offsets_there, 0);
}

__device__ __forceinline__ void add_vector(float* d, const float4* from) {
    const float4 v = __ldcg(from);
    d[0] += v.x, d[1] += v.y, d[2] += v.z, d[3] += v.w;
}

// Adds the partial tiles of a strip, but the one of number `own`, in the order of k: of the tokens from FIRST on that are staged at once.
template <int TOKENS, int FIRST>
__device__ __forceinline__ void add_partials(float (&sums)[staged_tokens<TOKENS> / 2], const GemmBlock& block, const Ending& ending, u32 own) {
#pragma unroll 1
    for (u32 part = 0; part < ending.parts; ++part) {
        if (part == own) continue;
        const float4* from = partial_tile<TOKENS>(block, ending.segment, ending.first + part) + FIRST / 8 * GEMM_THREADS;
#pragma unroll
        for (int i = 0; i < staged_tokens<TOKENS> / 8; ++i)
            if (FIRST + 8 * i < block.args.rows) add_vector(sums + 4 * i, from + i * GEMM_THREADS);
    }
}

// Finishes a strip: of the tokens from FIRST on that are staged at once, and then of the rest. PARTIALS: sums are added to what other blocks have
// stored, or given way to it all with `own` beyond the parts.
template <int TOKENS, bool PARTIALS, int FIRST = 0, class Sum>
__device__ __forceinline__ void finish_strip(const Sum (&sums)[TOKENS / 2], const GemmBlock& block, const Ending& ending, u32 own = 0) {
    constexpr int STAGED = staged_tokens<TOKENS>;
    if constexpr (FIRST == 0) wait_for_scales(block);
    float totals[STAGED / 2];
#pragma unroll
    for (int i = 0; i < STAGED / 2; ++i) totals[i] = PARTIALS && own >= ending.parts ? 0.0f : float(sums[FIRST / 2 + i]);
    if constexpr (PARTIALS) add_partials<TOKENS, FIRST>(totals, block, ending, own);
#pragma unroll
    for (int i = 0; i < STAGED / 8; ++i) stage_group(totals + 4 * i, block, 8 * i);
    block.sync();
    if (FIRST < block.args.rows) finish_rows(block, ending, TOKENS, FIRST, min(u32(STAGED), block.args.rows - FIRST));
    block.sync();  // the next sums and scales go where these are
    if constexpr (FIRST + STAGED < TOKENS) finish_strip<TOKENS, PARTIALS, FIRST + STAGED>(sums, block, ending, own);
}

// Whether all other partial tiles are there of the strip that the block's range ends with, where the list of units was cut. If not, or if there
// are several others, the block's own has been stored.
template <int TOKENS, class Sum>
__device__ __forceinline__ bool collect_last(const Sum (&sums)[TOKENS / 2], const GemmBlock& block, const Ending& ending) {
    u32* word = block.words + 1;
    if (block.leads()) {
        u32 now;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(block.args.arrivals + ending.segment.index) : "memory");
        *word = now;
    }
    block.sync();
    const bool there = *word == ending.parts - 1;
    if (!there || ending.parts > 2) store_partial<TOKENS>(sums, block, ending.segment);
    if (there) return true;
    count_part(block, ending.segment, word);  // behind a barrier: all have read the word
    block.sync();
    return *word == ending.parts - 1;
}

// Finishes the strip that the block's range ends with, where the list of units was cut, if all other partial tiles are there.
template <int TOKENS, class Sum>
__device__ __forceinline__ void finish_last(const Sum (&sums)[TOKENS / 2], const GemmBlock& block, const Ending& ending) {
    if (!collect_last<TOKENS>(sums, block, ending)) return;
    // The order of more than two terms matters: the block's own comes in its place, as it was stored.
    finish_strip<TOKENS, true>(sums, block, ending, ending.parts > 2 ? ~0u : ending.own);
}

// Finishes the strip that the block's range begins with, whose partial tile it has stored before, if that was the last one.
template <int TOKENS, class List>
__device__ __forceinline__ void finish_left(const GemmBlock& block) {
    asm volatile("cp.async.wait_all;" ::: "memory");  // what was fetched for the last strip, if it was not finished here
    block.sync();  // the word is there
    const GemmSegment segment(block.args, prefill_range_begin(block.args, blockIdx.x));
    const Ending ending(block, segment, List::bytes);
    if (*block.words != ending.parts - 1) return;
    fetch_for_end<TOKENS>(block, segment);
    const float none[TOKENS / 2] = {};
    finish_strip<TOKENS, true>(none, block, ending, ~0u);
}

// Stores the block's part of a strip that was cut into equal parts, and finishes its share of the tokens: eight at least, as accumulators have them.
template <int TOKENS, class Sum>
__device__ __forceinline__ void finish_shares(const Sum (&sums)[TOKENS / 2], const GemmBlock& block, const Ending& ending) {
    const u32 groups = (block.args.rows + 7) / 8, most = min(ending.parts, MOST_SHARES), share_groups = (groups + most - 1) / most;
    store_partial<TOKENS>(sums, block, ending.segment);
    count_part(block, ending.segment, block.words);
    if (block.leads()) {
        CutTile tile;
        tile.part = ending.own, tile.parts = ending.parts, tile.shares = (groups + share_groups - 1) / share_groups;
        tile.word = *block.words + 1;
        *block.words = tile.shares_to_end(block.args.arrivals + ending.segment.index);
    }
    wait_for_scales(block);
    block.sync();
#pragma unroll 1
    for (u32 shares = *block.words; shares != 0; shares &= shares - 1) {
        const u32 first = (__ffs(shares) - 1) * share_groups, end = min(groups, first + share_groups);
#pragma unroll 1
        for (u32 group = first; group < end; group += 2) {
            const bool both = TOKENS > 8 && group + 1 < end;
            float d[2][4] = {};
#pragma unroll 4
            for (u32 part = 0; part < ending.parts; ++part) {
                const float4* from = partial_tile<TOKENS>(block, ending.segment, ending.first + part) + group * GEMM_THREADS;
                add_vector(d[0], from);
                if (both) add_vector(d[1], from + GEMM_THREADS);
            }
            stage_group(d[0], block, 0);
            if (both) stage_group(d[1], block, 8);
            block.sync_pair();
            finish_rows(block, ending, TOKENS, 8 * group, min(both ? 16u : 8u, block.args.rows - 8 * group));
            block.sync_pair();
        }
    }
}

// From a work tile's sums to outputs: what byte sums leave out, the output Hadamard, the row's scale, svh, bias, crop and cast; and, where
// several thread blocks multiplied parts of an n tile, how their sums come together.
//
// Sums go through shared memory, [token][channel], where the first step of the transform is done on the way (channels 8 apart lie in one
// thread); a part that is stored in memory has the same form. All that follows needs no sums in registers and stands in the kernel once.
//
// A word of the n tile counts the parts in memory. Under stream-K, the block that has an n tile's first part comes to it
// last: others' parts have mostly been there for long; otherwise the block whose part comes last finishes the n tile. Nobody waits. Under
// split-K all blocks of an n tile are done at about the same time, and each finishes a slice of the tokens
// (prefill_parts.cuh says how a block that waits in vain hands its slice over). Partial sums are added in the order of k, whichever block adds them.
#pragma once
#include "barrier.cuh"
#include "gemm_schedule.cuh"
#include "prefill_parts.cuh"

constexpr u32 GEMM_CONSUMER_THREADS = 512;  // that multiply

constexpr float BYTE_STEP = 4.0f * MUL1_SCALE_18 / 262144.0f;  // what one step of a weight of int8 stands for

// Tokens whose sums are in shared memory at once: half of many, to leave room for the pipeline.
template <int TOKENS> constexpr int staged_tokens = TOKENS > 96 ? TOKENS / 2 : TOKENS;
template <int TOKENS> constexpr u32 gemm_staging_bytes = sizeof(Staging) + 4 * staged_tokens<TOKENS> * OUTPUT_PITCH;

// What the warps that multiply know.
struct GemmBlock {
    const PrefillArgs& args;
    Staging& staging;      // shared, of the pair of warpgroups that holds one Hadamard block
    const float* offsets;  // shared [shard][token], and the barrier that says that they are there
    u32 offsets_barrier;
    u32* words;            // shared: of the n tile that the range begins with, and of the one that it finishes with
    const float* pipeline;     // shared: free once all k blocks are multiplied; its address, its bytes
    u32 pipeline_at, pipeline_bytes;
    u32 partials_barrier;       // the barrier of others' parts
    u32 place;             // which Hadamard block of the n tile is the pair's
    int warp, lane, thread;  // in the pair

    __device__ __forceinline__ void sync() const { named_barrier_sync(1, GEMM_CONSUMER_THREADS); }
    __device__ __forceinline__ bool leads() const { return threadIdx.x == 0; }
    __device__ __forceinline__ bool leading_warp() const { return threadIdx.x < 32; }
    __device__ __forceinline__ u32 hadamard_block(const GemmWorkTile& work) const { return 2 * work.n_tile + place; }
};

// Starts to load the operands of a work tile's epilogue, whose readers wait for the copies and for the block.
template <int TOKENS>
__device__ __forceinline__ void load_epilogue_operands(const GemmBlock& block, const GemmWorkTile& work) {
    fetch_scales(block.args, block.staging, work.shard, block.hadamard_block(work), 0, TOKENS, block.thread, PAIR_THREADS);
}

// Sums the offsets of the rows of each shard that the block's range touches, by `threads` threads, which then arrive at `barrier`.
__device__ __forceinline__ void sum_offsets(const PrefillArgs& args, float* offsets, u32 tokens, u32 thread, u32 threads, u32 barrier) {
    GemmScheduler scheduler(args);
    GemmWorkTile work;
    u32 done = ~0u;
    while (scheduler.next(args, work)) {
        if (work.shard == done) continue;
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
    }
    mbarrier_arrive(barrier);
}

// Puts a thread's sums of the tokens from FIRST on in shared memory.
template <int TOKENS, int FIRST = 0, class Sum>
__device__ __forceinline__ void stage(const Sum (&sums)[TOKENS / 2], const GemmBlock& block) {
    float* to = block.staging.row(2 * (block.lane & 3)) + 16 * block.warp + (block.lane >> 2);
#pragma unroll
    for (int i = 0; i < staged_tokens<TOKENS> / 8; ++i) {
        const Sum* from = sums + FIRST / 2 + 4 * i;
        const float d[4] = {float(from[0]), float(from[1]), float(from[2]), float(from[3])};
        float* row = to + 8 * i * OUTPUT_PITCH;
        row[0] = d[0] + d[2], row[8] = d[0] - d[2], row[OUTPUT_PITCH] = d[1] + d[3], row[OUTPUT_PITCH + 8] = d[1] - d[3];
    }
}

// Where a range stores its partial sums of one of an n tile's Hadamard blocks, [token][channel]: a range has parts of at most two n tiles.
template <int TOKENS>
__device__ __forceinline__ float* partial_of(const GemmBlock& block, const GemmWorkTile& work, u32 range, u32 place) {
    const PrefillArgs& args = block.args;
    const u32 second = prefill_range_begin(args, range) < work.index * (args.in_features / GEMM_BLOCK_K) ? 1 : 0;
    return reinterpret_cast<float*>(args.partials) + static_cast<u64>(2 * (second * args.ranges + range) + place) * (TOKENS * HADAMARD_SIZE);
}

// Stores what is staged, the tokens from `first` on, as partial sums. A warp stores the channels that it has staged, and waits for no other.
template <int TOKENS>
__device__ __forceinline__ void store_staged_partial(const GemmBlock& block, const GemmWorkTile& work, u32 first) {
    const u32 token = block.lane / 4, channel = 16 * block.warp + 4 * (block.lane & 3);
    float* to = partial_of<TOKENS>(block, work, blockIdx.x, block.place) + (first + token) * HADAMARD_SIZE + channel;
    const float* from = block.staging.row(token) + channel;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < staged_tokens<TOKENS> / 8; ++i)
        if (first + 8 * i < block.args.rows) __stcg(reinterpret_cast<float4*>(to + 8 * i * HADAMARD_SIZE), *reinterpret_cast<const float4*>(from + 8 * i * OUTPUT_PITCH));
    __syncwarp();
}
// Counts the block's part, which it has left; `word` becomes the number of parts that were there before.
__device__ __forceinline__ void count_partial(const GemmBlock& block, const GemmWorkTile& work, u32* word) {
    block.sync();
    if (block.leads()) {
        u32 before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(block.args.arrivals + work.index), "r"(1u) : "memory");
        *word = before;
    }
}
// Stores a part whose first tokens are staged.
template <int TOKENS, class Sum>
__device__ __forceinline__ void store_partial(const Sum (&sums)[TOKENS / 2], const GemmBlock& block, const GemmWorkTile& work) {
    store_staged_partial<TOKENS>(block, work, 0);
    if constexpr (staged_tokens<TOKENS> < TOKENS) {
        stage<TOKENS, staged_tokens<TOKENS>>(sums, block);
        store_staged_partial<TOKENS>(block, work, staged_tokens<TOKENS>);
    }
}

// Tokens [begin, end) of an n tile that are ready to be finished.
struct EpilogueWork {
    GemmWorkTile work;
    u32 first, splits, own;  // the first range that has a part; how many have; which of them is staged, if any
    u32 begin, end;
    u32 staged;             // the first token that is staged
    float scale;            // from sums of products to sums of products of weights

    __device__ __forceinline__ EpilogueWork(const GemmBlock& block, const GemmWorkTile& work, bool bytes)
        : work(work), first(blockIdx.x), splits(1), own(0), begin(0), end(block.args.rows), staged(0),
          scale(bytes ? BYTE_STEP : block.args.shards[work.shard].complements ? BYTE_SUM_SCALE : 1.0f) {
        if (work.complete) return;
        const TileSplits all(block.args, work);
        first = all.first, splits = all.count, own = all.mine;
    }
    __device__ __forceinline__ u32 others() const { return own < splits ? splits - 1 : splits; }
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
    // `descale` may be as large as an activation: it comes last, so that nothing overflows before.
    __device__ __forceinline__ void scale(float (&v)[8], float factor, float descale, const u16* svh) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint2 raw = *reinterpret_cast<const uint2*>(svh + channel + 64 * half);
            const u32 words[2] = {raw.x, raw.y};
#pragma unroll
            for (int i = 0; i < 4; ++i) v[4 * half + i] = v[4 * half + i] * factor * half_to_float(u16(words[i / 2] >> 16 * (i & 1))) * descale;
        }
    }
    __device__ __forceinline__ void store_shared_row(const float (&v)[8], float* to) const {
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

// Brings the tokens [first, first + count) of all parts but the block's own to the pipeline's place. One warp, a copy a lane.
template <int TOKENS>
__device__ __forceinline__ void load_partials(const GemmBlock& block, const EpilogueWork& epilogue, u32 first, u32 count) {
    const u32 bytes = count * HADAMARD_SIZE * 4;
    asm volatile("fence.proxy.async;" ::: "memory");  // others wrote them by ordinary stores
    if (block.lane == 0) mbarrier_arrive_expect_tx(block.partials_barrier, 2 * bytes * epilogue.others());
    __syncwarp();
    for (u32 copy = block.lane; copy < 2 * epilogue.splits; copy += 32) {
        const u32 split = copy / 2, place = copy % 2;
        if (split == epilogue.own) continue;
        const u32 index = split > epilogue.own ? copy - 2 : copy;
        const float* from = partial_of<TOKENS>(block, epilogue.work, epilogue.first + split, place) + first * HADAMARD_SIZE;
        bulk_copy(block.pipeline_at + index * bytes, reinterpret_cast<const u8*>(from), bytes, block.partials_barrier);
    }
}

// Transforms and stores the tokens [first, first + count) of an n tile: the sum of what is staged and of what load_partials brought.
//
// This code runs once or twice in a launch, and instructions that come from memory while weights stream in take longer than they run: a short
// loop over rows, two of a warp at a time, is faster than one pass with all of them in registers.
__device__ __forceinline__ void finish_rows(const GemmBlock& block, const EpilogueWork& epilogue, u32 shard_tokens, u32 first, u32 count) {
    const PrefillArgs& args = block.args;
    const PrefillShard& shard = args.shards[epilogue.work.shard];
    const RowOfLane lanes(block.lane);
    const bool own = epilogue.own < epilogue.splits;  // else what is staged is no longer wanted
    const u32 hadamard_block = block.hadamard_block(epilogue.work);
    if (hadamard_block >= shard.out_features / HADAMARD_SIZE) return;
    const Crop crop(args, shard, hadamard_block);
    const float* offsets = block.offsets + epilogue.work.shard * shard_tokens;
    const float* partials = block.pipeline + block.place * count * HADAMARD_SIZE;
#pragma unroll 1
    for (u32 row = 2 * block.warp; row < count; row += 2 * PAIR_WARPS) {
        const u32 in_window = min(row + lanes.row, count - 1), token = first + in_window;
        float* staged = block.staging.row(own ? token - epilogue.staged : 2 * block.warp + lanes.row);
        float v[8] = {};
#pragma unroll 2
        for (u32 split = 0, other = 0; split < epilogue.splits; ++split) {
            if (split == epilogue.own) lanes.add(v, staged);
            else lanes.add(v, partials + (2 * other++ * count + in_window) * HADAMARD_SIZE);
        }
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
            crop.store(args, block.staging.row(own ? first + row - epilogue.staged : 2 * block.warp), min(2u, count - row), first + row, block.lane);
            __syncwarp();
        }
    }
}

// Runs the epilogue of some tokens of an n tile. COMPLETE: all sums are staged.
template <int TOKENS, bool COMPLETE>
__device__ __forceinline__ void finish_tokens(const GemmBlock& block, const EpilogueWork& epilogue, u32& partials_phase) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    mbarrier_wait(block.offsets_barrier, 0);
    block.sync();  // scales and sums are there
    if constexpr (COMPLETE) {
        finish_rows(block, epilogue, TOKENS, epilogue.begin, epilogue.end - epilogue.begin);
        block.sync();  // the next n tile's sums and scales go where this one's are
    } else {
        const u32 most = block.pipeline_bytes / (2 * HADAMARD_SIZE * 4) / max(1u, epilogue.others());
#pragma unroll 1
        for (u32 first = epilogue.begin; first < epilogue.end; first += most) {
            const u32 count = min(most, epilogue.end - first);
            if (block.leading_warp()) load_partials<TOKENS>(block, epilogue, first, count);
            mbarrier_wait(block.partials_barrier, partials_phase), partials_phase ^= 1;
            finish_rows(block, epilogue, TOKENS, first, count);
            block.sync();  // others' parts have been read
        }
    }
}

// Stores the part of the range's last n tile if all of it is staged; else it was stored before, and what is staged is not needed any more.
template <int TOKENS>
__device__ __forceinline__ void store_last_partial(const GemmBlock& block, EpilogueWork& epilogue) {
    if (staged_tokens<TOKENS> == TOKENS) store_staged_partial<TOKENS>(block, epilogue.work, 0);
    else epilogue.own = ~0u;
}

// Whether the block finishes an n tile, of which its range has the last k blocks and has staged them, under stream-K.
template <int TOKENS>
__device__ __forceinline__ bool claim_tile(const GemmBlock& block, EpilogueWork& epilogue) {
    u32* word = block.words + 1;
    if (block.leads()) {
        u32 now;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(block.args.arrivals + epilogue.work.index) : "memory");
        *word = now;
    }
    block.sync();
    if (staged_tokens<TOKENS> == TOKENS && *word == epilogue.splits - 1) return true;
    store_last_partial<TOKENS>(block, epilogue);
    count_partial(block, epilogue.work, word);  // behind a barrier: all have read the word
    block.sync();
    return *word == epilogue.splits - 1;
}

// The slices of the tokens that the block finishes, a bit each, under split-K. `tokens`: of a slice.
template <int TOKENS>
__device__ __forceinline__ u32 claim_slices(const GemmBlock& block, EpilogueWork& epilogue, u32& tokens) {
    const u32 most = min(epilogue.splits, MAX_SLICES);
    tokens = (block.args.rows + most - 1) / most;
    SplitTile tile;
    tile.split = epilogue.own, tile.splits = epilogue.splits, tile.slices = (block.args.rows + tokens - 1) / tokens;
    store_last_partial<TOKENS>(block, epilogue);
    count_partial(block, epilogue.work, block.words);
    if (block.leads()) {
        tile.word = *block.words + 1;
        *block.words = tile.slices_to_reduce(block.args.arrivals + epilogue.work.index);
    }
    block.sync();
    return *block.words;
}

// The trellis GEMM for 17 tokens and more on Hopper: weights are decoded to fp16 in registers, as the A operand of wgmma,
// once for up to 128 tokens.
//
// sm_90a only, for what neither the GEMM, the prefill nor the narrow kernel serves there (cuda/linear.py, cuda/dispatch.json): every number of
// tokens under VLLM_BATCH_INVARIANT=1; and from 17 tokens on layers with few weights a multiprocessor, with shards of more than two kinds or
// of several input widths, with two kinds above 64 tokens, and with mcg or 3INST above 96.
//
// One block per multiprocessor, four warpgroups in two pairs; a warpgroup holds 64 output channels, one tile column a warp.
// SPLIT_K = false: an n tile is two Hadamard blocks, one a pair; all multiply the same activations.
// SPLIT_K = true:  an n tile is one Hadamard block; the pairs take its k blocks in turn and are added at its end. More n tiles,
//                  and half the sums to exchange between blocks: for layers that give a block few k blocks.
// K blocks stream through a pipeline in shared memory, one for all warps that take the same k blocks. While a warpgroup decodes, the
// others' products run, and its own of the k block before.
#pragma once
#include "base/barrier.cuh"
#include "base/fragments.cuh"
#include "wide/cursor.cuh"
#include "base/store.cuh"
#include "base/wgmma.cuh"

constexpr int WIDE_THREADS = 512;

// The block's pipeline of k blocks.
struct WidePipeline {
    u32 base, stride, weight_bytes, stages, n_tile_halves;
    u32 full, empty;        // barriers, `stages` each
    u32 index, phase, stage; // being read: its number, its barriers' parity, its address

    __device__ __forceinline__ void next() {
        ++index, stage += stride;
        if (index == stages) index = 0, stage = base, phase ^= 1;
    }
};

// The producer's state, in the first warp: which k block goes to which stage next.
struct WideProducer {
    Cursor cursor;
    u32 filled, phase;  // stage, and the parity of its empty barrier
    u32 step;           // from one k block of this pipeline to the next

    __device__ __forceinline__ void next(const LinearArgs& args, const WidePipeline& pipeline) {
        if (++filled == pipeline.stages) filled = 0, phase ^= 1;
        cursor.advance(args, step);
    }
    template <bool WEIGHTS, bool ACTIVATIONS>
    __device__ __forceinline__ void fetch(const WidePipeline& pipeline) const {
        const u32 barrier = pipeline.full + 8 * filled, target = pipeline.base + filled * pipeline.stride;
        const u32 pitch = pipeline.n_tile_halves * cursor.row_bytes + ROW_PAD;
        if (!elect_one()) return;
        if (WEIGHTS) {
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                         ::"r"(barrier), "r"(4 * cursor.n_tile_bytes + cursor.activation_bytes) : "memory");
#pragma unroll
            for (int row = 0; row < 4; ++row)
                bulk_copy(target + row * pitch, cursor.weights + static_cast<u64>(row) * cursor.pitch, cursor.n_tile_bytes, barrier);
        }
        if (ACTIVATIONS) bulk_copy(target + pipeline.weight_bytes, cursor.activations, cursor.activation_bytes, barrier);
    }
};

// The part of an n tile that one block computed.
struct WideWorkTile {
    u32 shard, n_tile, n_tile_begin, n_tile_end;
    bool complete;
};

struct WideBlock {
    const LinearArgs& args;
    float* staging;  // shared: sums on their way between the pairs, then outputs
    u32* last;       // shared
    WidePipeline pipeline;
    WideProducer producer;
    u32 k_block;        // k block that is multiplied next
    u32 held;        // stages that are read before the first of them is free: decoding runs one ahead
    int pair, warp, lane;  // warp among those that share the pipeline

    // Fills the oldest stage again, once every warp has left it, and waits for the stage that is read next.
    __device__ __forceinline__ void wait_for_k_block() {
        if (held) {
            --held;
        } else if (warp == 0) {
            if (producer.cursor.valid()) {
                mbarrier_wait(pipeline.empty + 8 * producer.filled, producer.phase);
                producer.template fetch<true, true>(pipeline);
            }
            producer.next(args, pipeline);
        }
        mbarrier_wait(pipeline.full + 8 * pipeline.index, pipeline.phase);
    }
};

#include "wide/epilogue.cuh"

// The A operand of the k block in the stage being read: four products' worth.
template <class K, bool SPLIT_K>
__device__ __forceinline__ void decode_k_block(u32 (&a)[4][4], const WideBlock& block) {
    using W = typename K::Window;
    constexpr u32 tile_bytes = 4 * W::tile_words, row_bytes = (SPLIT_K ? 2 : 4) * HALF_TILES * tile_bytes + ROW_PAD;
    u32 words[W::words];
    load_words<K::half_bits>(words, SharedWords{block.pipeline.stage + (block.lane & 3) * row_bytes + block.warp * tile_bytes}, block.lane);
    decode_step<K, 0>(a[0], words);
    decode_step<K, 1>(a[1], words);
    decode_step<K, 2>(a[2], words);
    decode_step<K, 3>(a[3], words);
}

template <int TOKENS>
__device__ __forceinline__ void multiply_k_block(float (&sums)[TOKENS / 2], u32 (&a)[4][4], const WidePipeline& pipeline) {
    const u64 b = matrix_descriptor<TOKENS * 16>(pipeline.stage + pipeline.weight_bytes);
    // All of A must be there before the fence: decoding that the compiler moves behind it makes ptxas add waits (C7519).
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
    warpgroup_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) WarpgroupMma<TOKENS>::run(sums, a[i], b + 2 * i * TOKENS);
    warpgroup_commit();
}

template <class K, int TOKENS, bool SPLIT_K>
__device__ __forceinline__ void run_wide_work_tile(WideBlock& block, const WideWorkTile& work, u32 work_end) {
    constexpr u32 step = SPLIT_K ? 2 : 1;
    float sums[TOKENS / 2] = {};
    u32 even[4][4], odd[4][4];  // one is multiplied while the other is decoded
    const auto multiply = [&](u32 (&current)[4][4], u32 (&next)[4][4]) {
        multiply_k_block<TOKENS>(sums, current, block.pipeline);
        const u32 empty = block.pipeline.empty + 8 * block.pipeline.index;
        block.pipeline.next();
        block.k_block += step;
        const bool more = block.k_block < work_end;
        if (more) {
            block.wait_for_k_block();
            decode_k_block<K, SPLIT_K>(next, block);
        }
        warpgroup_wait();
        if (block.lane == 0) mbarrier_arrive(empty);
        return more;
    };
    if (block.k_block < work_end) {
        block.wait_for_k_block();
        decode_k_block<K, SPLIT_K>(even, block);
        while (multiply(even, odd) && multiply(odd, even)) {}
    }
    finish_wide<TOKENS, SPLIT_K>(sums, block, work);
}

template <class... Ks> struct WideKinds {};

template <int TOKENS, bool SPLIT_K, class... Ks>
__device__ __forceinline__ void dispatch_wide(WideKinds<Ks...>, u32 kind, WideBlock& block, const WideWorkTile& work, u32 end) {
    u32 index = 0;
    ((index++ == kind ? run_wide_work_tile<Ks, TOKENS, SPLIT_K>(block, work, end) : void()), ...);
}

template <int TOKENS, bool SPLIT_K, class List>
__device__ __forceinline__ void linear_wide(const LinearArgs& args) {
    extern __shared__ __align__(128) u8 memory[];
    constexpr u32 groups = SPLIT_K ? 2 : 1, group_warps = WIDE_THREADS / 32 / groups;  // warps that share a pipeline
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const u32 group = warp / group_warps;
    const u32 begin = range_begin(args, blockIdx.x), end = range_begin(args, blockIdx.x + 1);
    WideBlock block{args};
    block.pair = warp / PAIR_WARPS, block.warp = warp % group_warps, block.lane = lane;

    // Shared memory: a flag and barriers, staging, the pipelines.
    constexpr u32 staging_at = 512;
    block.last = reinterpret_cast<u32*>(memory);
    block.staging = reinterpret_cast<float*>(memory + staging_at);
    WidePipeline& pipeline = block.pipeline;
    pipeline.stages = args.pipeline_stages;
    pipeline.n_tile_halves = SPLIT_K ? 2 : 4;
    pipeline.weight_bytes = pipeline.n_tile_halves * args.half_stride;
    pipeline.stride = pipeline.weight_bytes + args.activation_stride;
    pipeline.full = shared_address(memory) + 16 + group * 16 * pipeline.stages, pipeline.empty = pipeline.full + 8 * pipeline.stages;
    pipeline.base = pipeline.stage = shared_address(memory) + staging_at + staging_bytes<TOKENS, SPLIT_K>() + group * pipeline.stages * pipeline.stride;
    pipeline.index = 0, pipeline.phase = 0;
    if (block.warp == 0 && lane == 0) {
        for (u32 i = 0; i < pipeline.stages; ++i) mbarrier_init(pipeline.full + 8 * i, 1), mbarrier_init(pipeline.empty + 8 * i, group_warps);
        fence_barrier_init();
    }
    __syncthreads();

    WideProducer& producer = block.producer;
    producer.cursor.k_block = begin + group, producer.cursor.end = end;
    producer.filled = 0, producer.phase = 0, producer.step = groups;
    WideProducer first{};
    if (block.warp == 0) {
        if (producer.cursor.valid()) producer.cursor.seek(args);
        first = producer;
        for (u32 i = 0; i < pipeline.stages; ++i, producer.next(args, pipeline))
            if (producer.cursor.valid()) producer.template fetch<true, false>(pipeline);
    }
    launch_dependent_grids();
    wait_on_dependent_grids();
    if (block.warp == 0) {
        for (u32 i = 0; i < pipeline.stages; ++i, first.next(args, pipeline))
            if (first.cursor.valid()) first.template fetch<false, true>(pipeline);
        producer.phase = 0;  // the first refill waits for the first use
    }

    WideWorkTile work{};
    block.k_block = begin + group, block.held = 2;
    for (u32 at = begin; at < end;) {
        while (work.shard + 1 < args.shard_count && at >= args.shards[work.shard + 1].first_k_block) ++work.shard;
        const ShardArgs& shard = args.shards[work.shard];
        const u32 depth = shard.in_features / BLOCK_K;
        work.n_tile = (at - shard.first_k_block) / depth;
        work.n_tile_begin = shard.first_k_block + work.n_tile * depth;
        work.n_tile_end = work.n_tile_begin + depth;
        const u32 work_end = min(end, work.n_tile_end);
        work.complete = at == work.n_tile_begin && work_end == work.n_tile_end;
        dispatch_wide<TOKENS, SPLIT_K>(List{}, shard.kind, block, work, work_end);
        at = work_end;
    }
}

// The prefill GEMM's fast mode: mul1 weights rounded to int8 and int8 activations, at twice the rate of fp16 products.
//
// w = k_inv·(B - 510.27), B the sum of the product word's bytes. A weight becomes q = floor((B + 3) / 4) - 128, -128..124,
// which stands for 4·k_inv·q: the middle of the four B that slice a q is 0.06 of a step off, and nobody corrects that. Sums are
// exact in int32 up to k = 132,000, also those of parts of tiles, so bits do not depend on how k is split.
//
// k is permuted to suit the order in which a lane has its weights: product p, p < 2, of a k block holds in its bytes 4q..4q+3 of
// k the channels 2i, 2i+1, 2i+8, 2i+9 of k-tile q, with i = 2p, and in bytes 16+4q..19+4q those with i = 2p+1. They are the
// ring positions 8i..8i+3 of the one channel of a lane and 8i+4..8i+7 of the other.
//
// Roles are those of prefill/prefill.cuh, and the copying warp's neighbours end tiles: what is left of a tile is then not waited for.
#pragma once
#include "prefill/prefill.cuh"
#include "base/decode_int8.cuh"
#include "prefill/epilogue_int8.cuh"
#include "base/wgmma_int8.cuh"

struct ByteBlock {
    const PrefillArgs& args;
    PrefillPipeline pipeline;
    StagedEpilogue epilogue;
    u32 place;               // which Hadamard block of the n tile
    int warp, lane, thread;  // among those that multiply
};

template <int TOKENS, int WORDS>
__device__ __forceinline__ void multiply_bytes(int (&sums)[TOKENS / 2], u32 (&a)[4], u32 b, u32 (&words)[WORDS]) {
    issue_product<WarpgroupByteMma<TOKENS>>(sums, a, matrix_descriptor<0>(0) | b, words);
}

template <class K>
__device__ __forceinline__ void load_bytes_k_block(u32 (&words)[K::Window::words], const ByteBlock& block) {
    constexpr u32 tile_bytes = 4 * K::Window::tile_words, row_bytes = 8 * tile_bytes + ROW_PAD;
    load_words<K::half_bits>(words, SharedWords{block.pipeline.stage + (block.lane & 3) * row_bytes + block.warp * tile_bytes}, block.lane);
}

template <class K, class S>
__device__ __forceinline__ void multiply_work(ByteBlock& block, const PrefillWorkTile& work) {
    static_assert(K::codebook == MUL1, "other codebooks have no sum of bytes");
    constexpr int TOKENS = S::TOKENS;
    int products[TOKENS / 2] = {};
    u32 even[4], odd[4], words[K::Window::words];
    PrefillPipeline& pipeline = block.pipeline;
    mbarrier_wait(pipeline.full + 8 * pipeline.index, pipeline.phase);
    load_bytes_k_block<K>(words, block);
    decode_bytes_step<K, 0>(even, words);
    u32 before = 0;  // the empty barrier of the k block before, whose last product is still in flight
    for (u32 left = work.end - work.begin; left != 0; --left) {
        // In a cluster a shared address names its block above bit 24, where a descriptor has other things.
        const u32 b = u32(matrix_descriptor<TOKENS * 16>((pipeline.stage + block.args.weight_bytes) & 0x3ffff));
        multiply_bytes<TOKENS>(products, even, b, words);
        if (before) release<S::CLUSTER>(before, block.lane);
        decode_bytes_step<K, 1>(odd, words);
        before = pipeline.empty + 8 * pipeline.index;
        pipeline.next();
        // Behind the last k block this reads a stage that has undefined contents, and nobody uses it.
        if (left > 1) mbarrier_wait(pipeline.full + 8 * pipeline.index, pipeline.phase);
        load_bytes_k_block<K>(words, block);
        multiply_bytes<TOKENS>(products, odd, b + 2 * TOKENS, words);
        decode_bytes_step<K, 0>(even, words);
    }
    warpgroup_wait();
    release<S::CLUSTER>(before, block.lane);
    if (!has_block<S>(block.args, work, block.place)) return;
    if (!work.complete) return store_partials<S, IntPartials>(products, block, work);
    float sums[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sums[i] = static_cast<float>(products[i]);
    block.epilogue.hand_over<TOKENS>(sums, block.warp, block.lane);
}

template <class S, class... Ks>
__device__ __forceinline__ void dispatch_bytes(PrefillKinds<Ks...>, ByteBlock& block, const PrefillWorkTile& work) {
    const u32 kind = block.args.shards[work.shard].kind;
    u32 index = 0;
    ((index++ == kind ? multiply_work<Ks, S>(block, work) : void()), ...);
}

template <class S, class List>
__device__ __forceinline__ void prefill_int8(const PrefillArgs& args) {
    extern __shared__ __align__(128) u8 memory[];
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const u32 rank = S::CLUSTER == 1 ? 0 : cluster_rank();
    PrefillPipeline pipeline(args, shared_address(memory), StagedEpilogue::bytes(S::TOKENS), S::activation_bytes);
    const StagedEpilogue epilogue{shared_address(memory) + BARRIER_BYTES};
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < pipeline.stages; ++i)
            mbarrier_init(pipeline.full + 8 * i, 1), mbarrier_init(pipeline.empty + 8 * i, PAIR_WARPS * S::CLUSTER);
        fence_barrier_init();
    }
    if constexpr (S::CLUSTER == 1) __syncthreads();
    else cluster_sync();
    launch_dependent_grids();
    PrefillScheduler scheduler(args, blockIdx.x / S::CLUSTER, gridDim.x / S::CLUSTER);
    PrefillWorkTile work;
    if (warp < PRODUCER_THREADS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
        if (warp == 0) {
            produce<S>(args, pipeline, rank);
        } else {
            wait_on_dependent_grids();
            while (scheduler.next(args, work))
                if (work.complete && has_block<S>(args, work, rank)) epilogue.finish<S>(args, work, rank, warp - 1, lane);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
        wait_on_dependent_grids();
        ByteBlock block{args, pipeline, epilogue, rank};
        block.warp = warp - PRODUCER_THREADS / 32, block.lane = lane, block.thread = 32 * block.warp + lane;
        while (scheduler.next(args, work)) dispatch_bytes<S>(List{}, block, work);
    }
    // No block leaves while another may still write to its shared memory.
    __syncwarp();
    if constexpr (S::CLUSTER > 1) cluster_sync();
}

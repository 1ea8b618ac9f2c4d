// The trellis GEMM for up to 128 tokens on Hopper: weights are decoded in registers, as the A operand of wgmma, once for all tokens.
//
// One thread block a multiprocessor: four warpgroups that multiply (gemm_mainloop.cuh) and end n tiles (gemm_epilogue.cuh), and one that
// copies (gemm_ring.cuh) and hands its registers to them. gemm_schedule.cuh says which block multiplies what.
#pragma once
#include "gemm_epilogue.cuh"
#include "gemm_mainloop.cuh"

constexpr u32 GEMM_PRODUCER_THREADS = 128, GEMM_BLOCK_THREADS = GEMM_PRODUCER_THREADS + GEMM_CONSUMER_THREADS;
constexpr u32 GEMM_BARRIER_BYTES = 256;  // two words and a barrier, the pipeline's barriers

// All of one arithmetic.
template <class First, class... Ks> struct GemmKinds {
    static constexpr bool bytes = First::bytes;
    static_assert(((Ks::bytes == bytes) && ...), "activations are of one sort");
    static constexpr u32 token_bytes = ::token_bytes<First>;
    using Sum = typename First::Sum;
};

// Registers of a thread: that the block starts with, so few that a block of gemm_rotate.cu finds room beside it where the launch has
// one kind and not many tokens; and of the threads that copy and those that multiply.
template <int TOKENS, class List> struct GemmRegisters;
template <int TOKENS, class... Ks> struct GemmRegisters<TOKENS, GemmKinds<Ks...>> {
    static constexpr int start = sizeof...(Ks) == 1 && TOKENS <= 80 ? 88 : 96, producer = start - 64, consumer = start + 16;
    static_assert(GEMM_PRODUCER_THREADS * producer + GEMM_CONSUMER_THREADS * consumer <= GEMM_BLOCK_THREADS * start, "more than the block has");
};

// Multiplies a work tile of a shard of one of the launch's kinds.
template <int TOKENS, class... Ks>
__device__ __forceinline__ void multiply_work(GemmKinds<Ks...>, typename GemmKinds<Ks...>::Sum (&sums)[TOKENS / 2], GemmPipeline& pipeline, const GemmWorkTile& work, u32 kind, int warp, int lane) {
    u32 index = 0;
    const auto multiply = [&](auto k) {
        using K = decltype(k);
        if constexpr (K::products == 4 && TOKENS > 96) multiply_half_steps<K, TOKENS>(sums, pipeline, work.end - work.begin, warp, lane);
        else multiply_k_blocks<K, TOKENS>(sums, pipeline, work.end - work.begin, warp, lane);
    };
    ((index++ == kind ? multiply(Ks{}) : void()), ...);
}

// Multiplies the block's work tiles, and finishes the n tiles that come together here.
template <int TOKENS, class List>
__device__ __forceinline__ void consume(const PrefillArgs& args, GemmPipeline pipeline, const GemmBlock& block, int warp) {
    GemmScheduler scheduler(args);
    GemmWorkTile work;
    u32 phase = 0;  // of others' parts
    bool stored_first = false;  // the range's first n tile, as another block has its beginning
    wait_on_dependent_grids();
    // No loop in here may end for some lanes before others: addresses in the pipeline would no longer be known to be the same for a warp, which
    // costs the products a twentieth.
    while (scheduler.next(args, work)) {
        if (work.complete || scheduler.k_block == scheduler.k_block_end) load_epilogue_operands<TOKENS>(block, work);  // else it is left to others
        typename List::Sum sums[TOKENS / 2] = {};
        multiply_work<TOKENS>(List{}, sums, pipeline, work, args.shards[work.shard].kind, warp, block.lane);
        stage<TOKENS>(sums, block);
        if (work.complete) {
            EpilogueWork epilogue(block, work, List::bytes);
            epilogue.end = min(args.rows, u32(staged_tokens<TOKENS>));
            finish_tokens<TOKENS, true>(block, epilogue, phase);
            if constexpr (staged_tokens<TOKENS> < TOKENS) {
                stage<TOKENS, staged_tokens<TOKENS>>(sums, block);
                epilogue.begin = epilogue.staged = epilogue.end, epilogue.end = args.rows;
                finish_tokens<TOKENS, true>(block, epilogue, phase);
            }
        } else if (scheduler.k_block < scheduler.k_block_end) {
            store_partial<TOKENS>(sums, block, work);
            count_partial(block, work, block.words);
            stored_first = true;
        } else if constexpr (staged_tokens<TOKENS> < TOKENS) {
            store_partial<TOKENS>(sums, block, work);
        }
    }
    EpilogueWork epilogue(block, work, List::bytes);
    u32 slices = 0, tokens = args.rows;  // slices of an n tile's tokens that the block finishes, a bit each; tokens of a slice
    if (!work.complete) slices = args.split_k ? claim_slices<TOKENS>(block, epilogue, tokens) : claim_tile<TOKENS>(block, epilogue);
#pragma unroll 1
    while (true) {
        if (slices == 0 && stored_first) {
            stored_first = false;
            asm volatile("cp.async.wait_all;" ::: "memory");  // what was fetched for the last n tile, if it was not finished here
            block.sync();  // the word is there
            GemmScheduler(args).next(args, work);
            epilogue = EpilogueWork(block, work, List::bytes);
            epilogue.own = ~0u;  // other sums have been staged since
            slices = *block.words == epilogue.splits - 1;
            if (slices) load_epilogue_operands<TOKENS>(block, work);
        }
        if (slices == 0) return;
        epilogue.begin = (__ffs(slices) - 1) * tokens, epilogue.end = min(args.rows, epilogue.begin + tokens), slices &= slices - 1;
        finish_tokens<TOKENS, false>(block, epilogue, phase);
    }
}

template <int TOKENS, class List>
__device__ __forceinline__ void gemm(const PrefillArgs& args) {
    extern __shared__ __align__(128) u8 memory[];
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    // Shared memory: words and barriers, offsets, what epilogues need, the pipeline.
    constexpr u32 staging = gemm_staging_bytes<TOKENS>, offset_bytes = 4 * MAX_SHARDS * TOKENS, head = GEMM_BARRIER_BYTES + offset_bytes;
    constexpr u32 pipeline_at = (head + 2 * staging + 127) & ~127u;
    const u32 base = shared_address(memory), offsets_barrier = base + 8, partials_barrier = base + 16;
    // Rounded here, although it is the same: the compiler then knows of all addresses in the pipeline that they are the same for a warp.
    const GemmPipeline pipeline(args, base + 24, (base + head + 2 * staging + 127) & ~127u, List::token_bytes * TOKENS);
    float* offsets = reinterpret_cast<float*>(memory + GEMM_BARRIER_BYTES);
    if (threadIdx.x == 0) {
        mbarrier_init(offsets_barrier, GEMM_PRODUCER_THREADS - 32);
        mbarrier_init(partials_barrier, 1);
        pipeline.init(GEMM_CONSUMER_THREADS / 32);
    }
    __syncthreads();
    launch_dependent_grids();
    if (warp >= GEMM_CONSUMER_THREADS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GemmRegisters<TOKENS, List>::producer));
        if (warp == GEMM_CONSUMER_THREADS / 32) {
            produce(args, pipeline, List::token_bytes * TOKENS);
        } else {
            wait_on_dependent_grids();
            sum_offsets(args, offsets, TOKENS, threadIdx.x - GEMM_CONSUMER_THREADS - 32, GEMM_PRODUCER_THREADS - 32, offsets_barrier);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GemmRegisters<TOKENS, List>::consumer));
        const u32 pair = warp / PAIR_WARPS;
        const GemmBlock block{args, *reinterpret_cast<Staging*>(memory + head + pair * staging), offsets, offsets_barrier, reinterpret_cast<u32*>(memory),
                        reinterpret_cast<const float*>(memory + pipeline_at), pipeline.base, pipeline.stages * pipeline.stride, partials_barrier, pair, warp % PAIR_WARPS, lane,
                        int(threadIdx.x % PAIR_THREADS)};
        consume<TOKENS, List>(args, pipeline, block, warp);
    }
}

// The trellis GEMM for up to 128 tokens on Hopper: weights are decoded in registers, as the A operand of wgmma, once for all tokens.
//
// One thread block a multiprocessor: four warpgroups that multiply (gemm/mainloop.cuh) and end n tiles (gemm/epilogue.cuh), and one that
// copies (gemm/pipeline.cuh) and hands its registers to them. gemm/scheduler.cuh says which block multiplies what.
#pragma once
#include "gemm/epilogue.cuh"
#include "gemm/mainloop.cuh"

constexpr u32 GEMM_PRODUCER_THREADS = 128, GEMM_BLOCK_THREADS = GEMM_PRODUCER_THREADS + GEMM_CONSUMER_THREADS;
constexpr u32 GEMM_MOST_STAGES = 12;
constexpr u32 GEMM_BARRIER_BYTES = 256;  // two words, a barrier, the pipeline's barriers
static_assert(16 + 16 * GEMM_MOST_STAGES <= GEMM_BARRIER_BYTES, "each stage has a full and an empty barrier");
// Shared memory: those, offsets, what epilogues need, the pipeline.
template <int TOKENS> constexpr u32 gemm_head_bytes = GEMM_BARRIER_BYTES + 4 * MAX_SHARDS * TOKENS;

// All of one arithmetic.
template <class First, class... Ks> struct GemmKinds {
    static constexpr bool bytes = First::bytes;
    static_assert(((Ks::bytes == bytes) && ...), "activations are of one sort");
    static constexpr u32 token_bytes = ::token_bytes<First>;
    using Sum = typename First::Sum;
};

// Registers of a thread: that the block starts with, so few that a block of gemm/rotate.cu finds room beside it where the launch has
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

// The state of a consumer thread: made anew where it is needed, to take no registers beside products.
template <int TOKENS>
__device__ __forceinline__ GemmBlock consumer_block(const PrefillArgs& args, u8* memory) {
    const u32 thread = threadIdx.x;
    const u32 pair = __shfl_sync(0xffffffffu, thread / PAIR_THREADS, 0), warp = __shfl_sync(0xffffffffu, thread / 32 % PAIR_WARPS, 0);
    float* offsets = reinterpret_cast<float*>(memory + GEMM_BARRIER_BYTES);
    u8* staging = memory + gemm_head_bytes<TOKENS> + pair * gemm_staging_bytes<TOKENS>;
    return GemmBlock{args, *reinterpret_cast<Staging*>(staging), offsets, shared_address(memory) + 8, reinterpret_cast<u32*>(memory), pair, int(warp), int(thread & 31), int(thread % PAIR_THREADS)};
}

// Multiplies the block's work tiles, and finishes the n tiles whose sums come together here.
template <int TOKENS, class List>
__device__ __forceinline__ void consume(const PrefillArgs& args, GemmPipeline pipeline, u8* memory, int warp, int lane) {
    u32 k_block = range_begin(args, blockIdx.x);
    bool stored_first = false;  // the range's first n tile, as another block has its beginning
    wait_on_dependent_grids();
    // No loop in here may end for some lanes before others: addresses in the pipeline would no longer be known to be the same for a warp, which
    // costs the products a twentieth. What is looked up again behind the products takes no registers beside them.
    while (k_block < range_begin(args, blockIdx.x + 1)) {
        typename List::Sum sums[TOKENS / 2] = {};
        {
            const GemmWorkTile work(args, k_block);
            if (work.complete || work.last) load_epilogue_operands<TOKENS>(consumer_block<TOKENS>(args, memory), work);  // else it is left to others
            multiply_work<TOKENS>(List{}, sums, pipeline, work, args.shards[work.shard].kind, warp, lane);
        }
        const GemmBlock block = consumer_block<TOKENS>(args, memory);
        const GemmWorkTile work(args, rematerialize(k_block));
        if (work.complete) {
            finish_n_tile<TOKENS, false>(sums, block, EpilogueWork(block, work, List::bytes));
        } else if (!work.last) {
            store_partial<TOKENS>(sums, block, work);
            count_partial(block, work, block.words);
            stored_first = true;
        } else if (args.split_k) {
            return reduce_slices<TOKENS>(sums, block, EpilogueWork(block, work, List::bytes));
        } else {
            finish_last_n_tile<TOKENS>(sums, block, EpilogueWork(block, work, List::bytes));
            break;
        }
        k_block += work.end - work.begin;
    }
    if (stored_first) finish_first<TOKENS, List>(consumer_block<TOKENS>(args, memory));
}

template <int TOKENS, class List>
__device__ __forceinline__ void gemm(const PrefillArgs& args) {
    extern __shared__ __align__(128) u8 memory[];
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const u32 base = shared_address(memory), offsets_barrier = base + 8;
    // Rounded here, although it is the same: the compiler then knows of all addresses in the pipeline that they are the same for a warp.
    const GemmPipeline pipeline(args, base + 16, (base + gemm_head_bytes<TOKENS> + 2 * gemm_staging_bytes<TOKENS> + 127) & ~127u, List::token_bytes * TOKENS);
    float* offsets = reinterpret_cast<float*>(memory + GEMM_BARRIER_BYTES);
    if (threadIdx.x == 0) {
        mbarrier_init(offsets_barrier, GEMM_PRODUCER_THREADS - 32);
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
        consume<TOKENS, List>(args, pipeline, memory, warp, lane);
    }
}

// The trellis GEMM for up to 128 tokens on Hopper: weights are decoded in registers, as the A operand of wgmma, once for all tokens.
//
// One thread block a multiprocessor: four warpgroups that multiply (gemm_mainloop.cuh) and end strips (gemm_epilogue.cuh), and one that
// copies (gemm_ring.cuh) and hands its registers to them. gemm_schedule.cuh says which block multiplies what.
#pragma once
#include "gemm_epilogue.cuh"
#include "gemm_mainloop.cuh"

constexpr u32 GEMM_PRODUCERS = 128, GEMM_BLOCK_THREADS = GEMM_PRODUCERS + GEMM_THREADS;
constexpr u32 GEMM_BARRIER_BYTES = 256;  // two words, a barrier, the ring's barriers
// Shared memory: those, offsets, what finishing needs, the ring.
template <int TOKENS> constexpr u32 gemm_head_bytes = GEMM_BARRIER_BYTES + 4 * MAX_SHARDS * TOKENS;

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
    static_assert(GEMM_PRODUCERS * producer + GEMM_THREADS * consumer <= GEMM_BLOCK_THREADS * start, "more than the block has");
};

// Multiplies a segment of a shard of one of the launch's kinds.
template <int TOKENS, class... Ks>
__device__ __forceinline__ void multiply_segment(GemmKinds<Ks...>, typename GemmKinds<Ks...>::Sum (&sums)[TOKENS / 2], GemmRing& ring, const GemmSegment& segment, u32 kind, int warp, int lane) {
    u32 index = 0;
    const auto multiply = [&](auto k) {
        using K = decltype(k);
        if constexpr (K::products == 4 && TOKENS > 96) multiply_halves<K, TOKENS>(sums, ring, segment.end - segment.begin, warp, lane);
        else multiply_units<K, TOKENS>(sums, ring, segment.end - segment.begin, warp, lane);
    };
    ((index++ == kind ? multiply(Ks{}) : void()), ...);
}

// What a thread that multiplies knows besides: made anew where it is needed, to take no registers beside products.
template <int TOKENS>
__device__ __forceinline__ GemmBlock block_here(const PrefillArgs& args, u8* memory) {
    const u32 thread = threadIdx.x;
    const u32 pair = __shfl_sync(0xffffffffu, thread / PAIR_THREADS, 0), warp = __shfl_sync(0xffffffffu, thread / 32 % PAIR_WARPS, 0);
    float* offsets = reinterpret_cast<float*>(memory + GEMM_BARRIER_BYTES);
    u8* staging = memory + gemm_head_bytes<TOKENS> + pair * gemm_staging_bytes<TOKENS>;
    return GemmBlock{args, *reinterpret_cast<Staging*>(staging), offsets, shared_address(memory) + 8, reinterpret_cast<u32*>(memory), pair, int(warp), int(thread & 31), int(thread % PAIR_THREADS)};
}

// Multiplies the block's segments, and finishes the strips whose sums come together here.
template <int TOKENS, class List>
__device__ __forceinline__ void consume(const PrefillArgs& args, GemmRing ring, u8* memory, int warp, int lane) {
    u32 unit = prefill_range_begin(args, blockIdx.x);
    bool left = false;  // the range's first strip, as another block has its beginning
    wait_for_previous();
    // No loop in here may end for some lanes before others: addresses in the ring would no longer be known to be the same for a warp, which
    // costs the products a twentieth. What is looked up again behind the products takes no registers beside them.
    while (unit < prefill_range_begin(args, blockIdx.x + 1)) {
        typename List::Sum sums[TOKENS / 2] = {};
        {
            const GemmSegment segment(args, unit);
            if (segment.complete || segment.last) fetch_for_end<TOKENS>(block_here<TOKENS>(args, memory), segment);  // else it is left to others
            multiply_segment<TOKENS>(List{}, sums, ring, segment, args.shards[segment.shard].kind, warp, lane);
        }
        const GemmBlock block = block_here<TOKENS>(args, memory);
        const GemmSegment segment(args, not_before(unit));
        if (segment.complete) {
            finish_strip<TOKENS, false>(sums, block, Ending(block, segment, List::bytes));
        } else if (!segment.last) {
            store_partial<TOKENS>(sums, block, segment);
            count_part(block, segment, block.words);
            left = true;
        } else if (args.equal_parts) {
            return finish_shares<TOKENS>(sums, block, Ending(block, segment, List::bytes));
        } else {
            finish_last<TOKENS>(sums, block, Ending(block, segment, List::bytes));
            break;
        }
        unit += segment.end - segment.begin;
    }
    if (left) finish_left<TOKENS, List>(block_here<TOKENS>(args, memory));
}

template <int TOKENS, class List>
__device__ __forceinline__ void gemm(const PrefillArgs& args) {
    extern __shared__ __align__(128) u8 memory[];
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const u32 base = shared_address(memory), offsets_there = base + 8;
    // Rounded here, although it is the same: the compiler then knows of all addresses in the ring that they are the same for a warp.
    const GemmRing ring(args, base + 16, (base + gemm_head_bytes<TOKENS> + 2 * gemm_staging_bytes<TOKENS> + 127) & ~127u, List::token_bytes * TOKENS);
    float* offsets = reinterpret_cast<float*>(memory + GEMM_BARRIER_BYTES);
    if (threadIdx.x == 0) {
        mbarrier_init(offsets_there, GEMM_PRODUCERS - 32);
        ring.init(GEMM_THREADS / 32);
    }
    __syncthreads();
    let_next_start();
    if (warp >= GEMM_THREADS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GemmRegisters<TOKENS, List>::producer));
        if (warp == GEMM_THREADS / 32) {
            produce(args, ring, List::token_bytes * TOKENS);
        } else {
            wait_for_previous();
            sum_offsets(args, offsets, TOKENS, threadIdx.x - GEMM_THREADS - 32, GEMM_PRODUCERS - 32, offsets_there);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GemmRegisters<TOKENS, List>::consumer));
        consume<TOKENS, List>(args, ring, memory, warp, lane);
    }
}

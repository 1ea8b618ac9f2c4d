// The trellis GEMM for up to 128 tokens on Hopper: weights are decoded in registers, as the A operand of wgmma, once for all tokens.
//
// One thread block a multiprocessor: four warpgroups that multiply (gemm_mainloop.cuh) and end strips (gemm_epilogue.cuh), and one that
// copies (gemm_ring.cuh) and hands its registers to them. gemm_schedule.cuh says which block multiplies what.
#pragma once
#include "gemm_epilogue.cuh"
#include "gemm_mainloop.cuh"

constexpr u32 GEMM_PRODUCERS = 128, GEMM_BLOCK_THREADS = GEMM_PRODUCERS + GEMM_THREADS;
constexpr u32 GEMM_BARRIER_BYTES = 256;  // two words and a barrier, the ring's barriers

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

// Multiplies the block's segments, and ends the strips that come together here.
template <int TOKENS, class List>
__device__ __forceinline__ void consume(const PrefillArgs& args, GemmRing ring, const GemmBlock& block, int warp) {
    GemmWalk walk(args);
    GemmSegment segment;
    u32 phase = 0;  // of others' parts
    bool left = false;  // the range's first strip, as another block has its beginning
    wait_for_previous();
    // No loop in here may end for some lanes before others: addresses in the ring would no longer be known to be the same for a warp, which
    // costs the products a twentieth.
    while (walk.next(args, segment)) {
        if (segment.complete || walk.unit == walk.unit_end) fetch_for_end<TOKENS>(block, segment);  // else it is left to others
        typename List::Sum sums[TOKENS / 2] = {};
        multiply_segment<TOKENS>(List{}, sums, ring, segment, args.shards[segment.shard].kind, warp, block.lane);
        stage<TOKENS>(sums, block);
        if (segment.complete) {
            Ending ending(block, segment, List::bytes);
            ending.end = min(args.rows, u32(staged_tokens<TOKENS>));
            finish<TOKENS, true>(block, ending, phase);
            if constexpr (staged_tokens<TOKENS> < TOKENS) {
                stage<TOKENS, staged_tokens<TOKENS>>(sums, block);
                ending.begin = ending.staged = ending.end, ending.end = args.rows;
                finish<TOKENS, true>(block, ending, phase);
            }
        } else if (walk.unit < walk.unit_end) {
            leave<TOKENS>(sums, block, segment);
            count_part(block, segment, block.words);
            left = true;
        } else if constexpr (staged_tokens<TOKENS> < TOKENS) {
            leave<TOKENS>(sums, block, segment);
        }
    }
    Ending ending(block, segment, List::bytes);
    u32 shares = 0, tokens = args.rows;  // shares of a strip's tokens that the block ends, a bit each; tokens of a share
    if (!segment.complete) shares = args.equal_parts ? collect_shares<TOKENS>(block, ending, tokens) : collect_last<TOKENS>(block, ending);
#pragma unroll 1
    while (true) {
        if (shares == 0 && left) {
            left = false;
            asm volatile("cp.async.wait_all;" ::: "memory");  // what was fetched for the last strip, if it was not ended here
            block.sync();  // the word is there
            GemmWalk(args).next(args, segment);
            ending = Ending(block, segment, List::bytes);
            ending.own = ~0u;  // other sums have been staged since
            shares = *block.words == ending.parts - 1;
            if (shares) fetch_for_end<TOKENS>(block, segment);
        }
        if (shares == 0) return;
        ending.begin = (__ffs(shares) - 1) * tokens, ending.end = min(args.rows, ending.begin + tokens), shares &= shares - 1;
        finish<TOKENS, false>(block, ending, phase);
    }
}

template <int TOKENS, class List>
__device__ __forceinline__ void gemm(const PrefillArgs& args) {
    extern __shared__ __align__(128) u8 memory[];
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    // Shared memory: words and barriers, offsets, what ends need, the ring.
    constexpr u32 staging = gemm_staging_bytes<TOKENS>, offset_bytes = 4 * MAX_SHARDS * TOKENS, head = GEMM_BARRIER_BYTES + offset_bytes;
    constexpr u32 ring_at = (head + 2 * staging + 127) & ~127u;
    const u32 base = shared_address(memory), offsets_there = base + 8, parts_there = base + 16;
    // Rounded here, although it is the same: the compiler then knows of all addresses in the ring that they are the same for a warp.
    const GemmRing ring(args, base + 24, (base + head + 2 * staging + 127) & ~127u, List::token_bytes * TOKENS);
    float* offsets = reinterpret_cast<float*>(memory + GEMM_BARRIER_BYTES);
    if (threadIdx.x == 0) {
        mbarrier_init(offsets_there, GEMM_PRODUCERS - 32);
        mbarrier_init(parts_there, 1);
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
        const u32 pair = warp / PAIR_WARPS;
        const GemmBlock block{args, *reinterpret_cast<Staging*>(memory + head + pair * staging), offsets, offsets_there, reinterpret_cast<u32*>(memory),
                        reinterpret_cast<const float*>(memory + ring_at), ring.base, ring.stages * ring.stride, parts_there, pair, warp % PAIR_WARPS, lane,
                        int(threadIdx.x % PAIR_THREADS)};
        consume<TOKENS, List>(args, ring, block, warp);
    }
}

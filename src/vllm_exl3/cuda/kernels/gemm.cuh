// The trellis GEMM for up to 128 tokens on Hopper: weights are decoded in registers, as the A operand of wgmma, once for all tokens.
//
// One thread block a multiprocessor: four warpgroups that multiply (gemm_mainloop.cuh) and end strips (gemm_epilogue.cuh), and one that
// copies (gemm_ring.cuh) and hands its registers to them. gemm_schedule.cuh says which block multiplies what.
#pragma once
#include "gemm_epilogue.cuh"
#include "gemm_mainloop.cuh"

constexpr u32 GEMM_PRODUCERS = 128, GEMM_BLOCK_THREADS = GEMM_PRODUCERS + GEMM_THREADS;
constexpr u32 GEMM_BARRIER_BYTES = 256;  // two words and a barrier, the ring's barriers

template <class... Ks> struct GemmKinds {};

// Registers of a thread: that the block starts with, so few that a block of gemm_rotate.cu finds room beside it where the launch has
// one kind; and of the threads that copy and those that multiply.
template <class List> struct GemmRegisters;
template <class... Ks> struct GemmRegisters<GemmKinds<Ks...>> {
    static constexpr int start = sizeof...(Ks) == 1 ? 88 : 96, producer = start - 64, consumer = start + 16;
    static_assert(GEMM_PRODUCERS * producer + GEMM_THREADS * consumer <= GEMM_BLOCK_THREADS * start, "more than the block has");
};

// Multiplies a segment of a shard of one of the launch's kinds.
template <int TOKENS, class... Ks>
__device__ __forceinline__ void multiply_segment(GemmKinds<Ks...>, float (&sums)[TOKENS / 2], GemmRing& ring, const GemmSegment& segment, u32 kind, int warp, int lane) {
    u32 index = 0;
    ((index++ == kind ? multiply_units<Ks, TOKENS>(sums, ring, segment.end - segment.begin, warp, lane) : void()), ...);
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
        fetch_for_end<TOKENS>(block, segment);
        float sums[TOKENS / 2] = {};
        multiply_segment<TOKENS>(List{}, sums, ring, segment, args.shards[segment.shard].kind, warp, block.lane);
        stage<TOKENS>(sums, block);
        if (segment.complete) {
            finish<TOKENS, true>(block, Ending(block, segment), phase);
        } else if (walk.unit < walk.unit_end) {
            leave<TOKENS>(block, segment, block.words);
            left = true;
        }
    }
    Ending ending(block, segment);
    u32 shares = 0, tokens = args.rows;  // shares of a strip's tokens that the block ends, a bit each; tokens of a share
    if (!segment.complete) shares = args.equal_parts ? collect_shares<TOKENS>(block, ending, tokens) : collect_last<TOKENS>(block, ending);
#pragma unroll 1
    while (true) {
        if (shares == 0 && left) {
            left = false;
            block.sync();  // the word is there
            GemmWalk(args).next(args, segment);
            ending = Ending(block, segment);
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
    const GemmRing ring(args, base + 24, (base + head + 2 * staging + 127) & ~127u, GEMM_UNIT * 2 * TOKENS);
    float* offsets = reinterpret_cast<float*>(memory + GEMM_BARRIER_BYTES);
    if (threadIdx.x == 0) {
        mbarrier_init(offsets_there, GEMM_PRODUCERS - 32);
        mbarrier_init(parts_there, 1);
        ring.init(GEMM_THREADS / 32);
    }
    __syncthreads();
    let_next_start();
    if (warp >= GEMM_THREADS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GemmRegisters<List>::producer));
        if (warp == GEMM_THREADS / 32) {
            produce(args, ring, GEMM_UNIT * 2 * TOKENS);
        } else {
            wait_for_previous();
            sum_offsets(args, offsets, TOKENS, threadIdx.x - GEMM_THREADS - 32, GEMM_PRODUCERS - 32, offsets_there);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GemmRegisters<List>::consumer));
        const u32 pair = warp / PAIR_WARPS;
        const GemmBlock block{args, *reinterpret_cast<Staging*>(memory + head + pair * staging), offsets, offsets_there, reinterpret_cast<u32*>(memory),
                        reinterpret_cast<const float*>(memory + ring_at), ring.base, ring.stages * ring.stride, parts_there, pair, warp % PAIR_WARPS, lane,
                        int(threadIdx.x % PAIR_THREADS)};
        consume<TOKENS, List>(args, ring, block, warp);
    }
}

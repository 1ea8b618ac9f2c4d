// The grouped trellis GEMM for many rows on Hopper: weights are decoded to fp16 in registers, as the A operand of wgmma,
// once for all rows of a row block.
//
// A work tile is one row block × one Hadamard block of one projection, over all of k: nothing is shared between blocks. K blocks of
// 64 k stream through a pipeline in shared memory, on over the ends of work tiles; the first warp fills it. A block is a pair of
// warpgroups, 64 channels each, with one product in flight while the weights of the next are decoded (prefill/prefill.cuh says why
// one). A row's sums have the same order whatever its row block holds besides.
#pragma once
#include "base/fragments.cuh"
#include "moe/epilogue.cuh"
#include "base/mainloop.cuh"

// Matrices of one group of eight rows lie 128 bytes apart, groups 1024; without a swizzle.
template <class Pair>
__device__ __forceinline__ u64 activations_descriptor(const Pair& pair) {
    return u64(GROUP_BYTES >> 4) << 32 | (pair.activations() >> 4 | u32(128 >> 4) << 16);
}

// Where a lane finds its words in a k block. Kept in registers: the compiler would compute it again for every k block.
template <class K>
struct KBlockWords {
    static constexpr int own = K::Window::whole ? K::half_bits / 2 : 0;
    u32 offset, before;  // bytes from the k block's begin; the lane that owns the positions before

    template <class Pair>
    __device__ __forceinline__ explicit KBlockWords(const Pair& pair) {
        offset = (pair.lane & 3) * pair.args.weight_pitch + 4 * (pair.warp * K::Window::tile_words + own * (pair.lane >> 2));
        before = (pair.lane - 4) & 31;
        asm volatile("" : "+r"(offset), "+r"(before));
    }
    // As `load_words` of base/window.cuh.
    __device__ __forceinline__ void load(u32 (&words)[K::Window::words], u32 k_block, int lane) const {
        if constexpr (K::Window::whole) {
            u32 raw[own];
            SharedWords{k_block + offset}.template run<own>(raw, 0);
#pragma unroll
            for (int i = 0; i < own; ++i) words[i + 1] = raw[i];
            words[0] = __shfl_sync(0xffffffffu, raw[own - 1], before);
        } else {
            load_words<K::half_bits>(words, SharedWords{k_block + offset}, lane);
        }
    }
};

// mul1 weights go as byte sums, w = k_inv·(1024 + B) + k_bias without the format's rounding to fp16: the constant is added at the
// end, and two instructions of nine are saved.
template <class K>
struct WideDecoder {
    static constexpr int PRODUCTS = 4, words = K::Window::words;
    template <int I>
    static __device__ __forceinline__ void decode(u32 (&a)[4], const u32 (&from)[words]) {
        using W = typename K::Window;
        if constexpr (K::codebook == MUL1) {
            a[0] = decode_byte_sums<W::twice>(W::template get<8 * I>(from), W::template get<8 * I + 1>(from));
            a[1] = decode_byte_sums<W::twice>(W::template get<8 * I + 4>(from), W::template get<8 * I + 5>(from));
            a[2] = decode_byte_sums<W::twice>(W::template get<8 * I + 2>(from), W::template get<8 * I + 3>(from));
            a[3] = decode_byte_sums<W::twice>(W::template get<8 * I + 6>(from), W::template get<8 * I + 7>(from));
        } else {
            decode_step<K, I>(a, from);
        }
    }
};

// The pipeline for base/mainloop.cuh.
template <class K, class Pair>
struct MoeStages {
    static constexpr int K_BLOCKS = Pair::K_BLOCKS;
    Pair& pair;
    KBlockWords<K> at;  // where the lane's words are in a k block

    __device__ __forceinline__ explicit MoeStages(Pair& pair) : pair(pair), at(pair) {}
    __device__ __forceinline__ u32 count() const { return pair.stage.in_features / (K_BLOCKS * BLOCK_K); }
    __device__ __forceinline__ void wait() const { pair.wait_for_stage(); }
    __device__ __forceinline__ void advance() const { pair.pipeline.next(pair.args); }
    __device__ __forceinline__ u32 k_block(int index) const { return pair.pipeline.address + 4 * index * pair.args.weight_pitch; }
    __device__ __forceinline__ void load(u32 (&words)[K::Window::words], u32 k_block) const { at.load(words, k_block, pair.lane); }
    __device__ __forceinline__ u64 operand() const { return activations_descriptor(pair); }
    __device__ __forceinline__ u32 operand_step() const { return pair.args.activation_stride >> 4; }
    static __device__ __forceinline__ u64 descriptor(u64 b, int product) { return b + 16 * product; }
    __device__ __forceinline__ u32 empty() const { return pair.pipeline.empty(pair.args); }
    __device__ __forceinline__ void release(u32 barrier) const { pair.release(barrier); }
};

template <class K, int ROWS, class Pair>
__device__ __forceinline__ void multiply_rows(float (&sums)[ROWS / 2], Pair& pair) {
    multiply_stages<WideDecoder<K>, WarpgroupMma<ROWS>>(sums, MoeStages<K, Pair>(pair));
}

template <class First, class... Rest> struct WideKinds {
    static constexpr bool mixed = sizeof...(Rest) != 0;
    template <int ROWS, class Pair>
    static __device__ __forceinline__ void multiply(float (&sums)[ROWS / 2], Pair& pair, u32 work_tile) {
        if constexpr (sizeof...(Rest) == 0) {
            multiply_rows<First, ROWS>(sums, pair);
        } else {
            const u32 kind = pair.list.rows(work_tile).kind >> 8;
            const auto is = [&](u32 half_bits, u32 codebook) { return kind == (half_bits | codebook << 8); };
            if (is(First::half_bits, First::codebook)) multiply_rows<First, ROWS>(sums, pair);
            ((is(Rest::half_bits, Rest::codebook) ? multiply_rows<Rest, ROWS>(sums, pair) : void()), ...);
        }
    }
};

// The work tile is looked up again behind the loop, where registers are free.
template <class List, int ROWS, class Pair>
__device__ __forceinline__ void run_rows(Pair& pair, u32 work_tile) {
    float sums[ROWS / 2] = {};
    List::template multiply<ROWS>(sums, pair, work_tile);
    const u32 n_block = pair.n_block(work_tile);
    // Where a projection's last work tile is not full, a block of a cluster has decoded what it does not need.
    if (n_block < pair.stage.out_features / HADAMARD_SIZE)
        finish_rows<ROWS>(sums, pair, pair.list.rows(work_tile), pair.list.projection(work_tile, pair.list.rows(work_tile)), n_block);
}

// The narrowest product of LEAST, LEAST + STEP, … ROWS columns that the row block fits.
template <class List, int ROWS, int LEAST, int STEP, class Pair>
__device__ __forceinline__ void run_work_tile(Pair& pair, u32 work_tile, u32 rows) {
    if constexpr (ROWS > LEAST)
        if (rows <= ROWS - STEP) return run_work_tile<List, ROWS - STEP, LEAST, STEP>(pair, work_tile, rows);
    run_rows<List, ROWS>(pair, work_tile);
}

__device__ __forceinline__ void init_pipeline(u32 stages, u32 readers) {
    if (threadIdx.x != 0) return;
    for (u32 i = 0; i < stages; ++i) mbarrier_init(MoePipeline::memory() + 8 * i, 1), mbarrier_init(MoePipeline::memory() + 8 * (stages + i), readers);
    fence_barrier_init();
}

template <int K_BLOCKS, int ROWS, int LEAST, int STEP, class List>
__device__ __forceinline__ void moe_wide(const MoeArgs& args) {
    const MoeStage& stage = args.stages[args.stage];
    init_pipeline(args.pipeline_stages, PAIR_WARPS);
    __syncthreads();
    wait_on_dependent_grids();
    launch_dependent_grids();
    const WorkList<List::mixed> list(args, stage, 1);
    MoePair<K_BLOCKS, WorkList<List::mixed>> pair{args, stage, list};
    pair.warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), pair.lane = threadIdx.x & 31, pair.held = 2;
    pair.pipeline.address = MoePipeline::base();
    pair.cursor.work_tile = blockIdx.x, pair.cursor.filled = 0, pair.cursor.phase = 0;
    if (pair.warp == 0) {
        pair.cursor.seek(args, stage, list);
        for (u32 i = 0; i < args.pipeline_stages; ++i) pair.fetch();
        pair.cursor.phase = 0;  // the first refill waits for the first use
    }
    for (u32 work_tile = blockIdx.x; work_tile < list.work_tiles; work_tile += gridDim.x)
        run_work_tile<List, ROWS, LEAST, STEP>(pair, work_tile, list.rows(work_tile).rows);
}

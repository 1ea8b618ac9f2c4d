// The trellis GEMM for many tokens where there is no wgmma: the tiles and the decoding of prefill/prefill.cuh, with mma.sync and
// cp.async.
//
// A block is 8 warps and one Hadamard block, a tile column a warp. All threads copy k blocks into the pipeline, all warps multiply
// the same activations; one barrier a k block.
#pragma once
#include "base/cp_async.cuh"
#include "base/mma.cuh"
#include "prefill/epilogue.cuh"

struct MmaBlock {
    const PrefillArgs& args;
    u32 pipeline, stride;   // shared address of the first stage, bytes of a stage
    Staging& staging;   // shared
    u32 place;          // always 0: an n tile is one Hadamard block
    int warp, lane, thread;

    __device__ __forceinline__ void sync() const { __syncthreads(); }
};

// The k blocks of a work tile on their way into the pipeline.
template <class K, class S>
struct MmaSource {
    static constexpr u32 n_block_bytes = 8 * 4 * K::Window::tile_words, row_bytes = n_block_bytes + ROW_PAD;
    const u8* weights;      // of the k block that is copied next
    const u8* activations;
    u32 pitch;              // bytes from one k-tile row to the next
    u32 index = 0;

    __device__ __forceinline__ MmaSource(const PrefillArgs& args, const PrefillWorkTile& work) {
        const PrefillShard& shard = args.shards[work.shard];
        pitch = shard.out_features / HADAMARD_SIZE * n_block_bytes;
        weights = reinterpret_cast<const u8*>(shard.trellis) + static_cast<u64>(4 * work.begin) * pitch + work.n_tile * n_block_bytes;
        activations = args.activations + static_cast<u64>((work.shard * args.row_tiles + work.row_tile) *
                                                              (args.in_features / BLOCK_K) + work.begin) * S::activation_bytes;
    }
    __device__ __forceinline__ void copy(const MmaBlock& block) {
        constexpr u32 per_row = n_block_bytes / 16;
        const u32 target = block.pipeline + index * block.stride;
#pragma unroll
        for (u32 first = 0; first < 4 * per_row; first += PAIR_THREADS) {
            const u32 piece = first + block.thread, row = piece / per_row, at = piece % per_row * 16;
            if (4 * per_row % PAIR_THREADS == 0 || piece < 4 * per_row) cp_async_16(target + row * row_bytes + at, weights + row * pitch + at);
        }
#pragma unroll
        for (u32 at = 0; at < S::activation_bytes; at += 16 * PAIR_THREADS)
            cp_async_16(target + block.args.weight_bytes + at + 16 * block.thread, activations + at + 16 * block.thread);
        weights += 4 * pitch, activations += S::activation_bytes;
        index = index + 1 == block.args.stages ? 0 : index + 1;
    }
};

// Product I of a k block with all tokens.
template <class K, int TOKENS, int I>
__device__ __forceinline__ void multiply_mma(float (&sums)[TOKENS / 2], const u32 (&words)[K::Window::words], u32 activations, int lane) {
    u32 a[4];
    decode_step<K, I>(a, words);
    // Lane l gives the address of row l & 7 of matrix l >> 3: of two groups of 8 tokens both halves of k.
    const u32 from = activations + ((2 * I + (lane >> 3 & 1)) * TOKENS + (lane >> 4) * 8 + (lane & 7)) * 16;
#pragma unroll
    for (int group = 0; group < TOKENS / 8; group += 2) {
        u32 b[4];
        load_matrices(b[0], b[1], b[2], b[3], from + group * 128);
        float(&first)[4] = *reinterpret_cast<float(*)[4]>(sums + 4 * group);
        float(&second)[4] = *reinterpret_cast<float(*)[4]>(sums + 4 * group + 4);
        mma_half(first, a, b[0], b[1]);
        mma_half(second, a, b[2], b[3]);
    }
}

template <class K, class S>
__device__ __forceinline__ void multiply_work(MmaBlock& block, const PrefillWorkTile& work) {
    constexpr u32 tile_bytes = 4 * K::Window::tile_words;
    const PrefillArgs& args = block.args;
    MmaSource<K, S> source(args, work);
    const u32 count = work.end - work.begin;
    float sums[S::TOKENS / 2] = {};
    __syncthreads();  // the work tile before has read its last k blocks
    fetch_scales<S>(block, work);
    for (u32 k_block = 0; k_block + 1 < args.stages; ++k_block) {
        if (k_block < count) source.copy(block);
        cp_async_commit();
    }
    u32 index = 0;
    for (u32 k_block = 0; k_block < count; ++k_block) {
        if (args.stages == 2) cp_async_wait<0>();
        else if (args.stages == 3) cp_async_wait<1>();
        else cp_async_wait<2>();
        __syncthreads();
        if (k_block + args.stages - 1 < count) source.copy(block);
        cp_async_commit();
        const u32 at = block.pipeline + index * block.stride, activations = at + args.weight_bytes;
        index = index + 1 == args.stages ? 0 : index + 1;
        u32 words[K::Window::words];
        load_words<K::half_bits>(words, SharedWords{at + (block.lane & 3) * MmaSource<K, S>::row_bytes + block.warp * tile_bytes}, block.lane);
        multiply_mma<K, S::TOKENS, 0>(sums, words, activations, block.lane);
        multiply_mma<K, S::TOKENS, 1>(sums, words, activations, block.lane);
        multiply_mma<K, S::TOKENS, 2>(sums, words, activations, block.lane);
        multiply_mma<K, S::TOKENS, 3>(sums, words, activations, block.lane);
    }
    finish_tile<S>(sums, block, work);
}

template <class S, class... Ks>
__device__ __forceinline__ void dispatch_mma(PrefillKinds<Ks...>, MmaBlock& block, const PrefillWorkTile& work) {
    const u32 kind = block.args.shards[work.shard].kind;
    u32 index = 0;
    ((index++ == kind ? multiply_work<Ks, S>(block, work) : void()), ...);
}

template <class S, class List>
__device__ __forceinline__ void prefill_mma(const PrefillArgs& args) {
    extern __shared__ __align__(128) u8 memory[];
    MmaBlock block{args, 0, 0, *reinterpret_cast<Staging*>(memory + BARRIER_BYTES)};
    block.warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), block.lane = threadIdx.x & 31, block.thread = threadIdx.x, block.place = 0;
    block.pipeline = shared_address(memory) + BARRIER_BYTES + STAGING_BYTES, block.stride = args.weight_bytes + S::activation_bytes;
    launch_dependent_grids();
    wait_on_dependent_grids();
    PrefillScheduler scheduler(args, blockIdx.x, gridDim.x);
    PrefillWorkTile work;
    while (scheduler.next(args, work)) dispatch_mma<S>(List{}, block, work);
}

// The products of one work tile: wgmma on weights that the warps decode into registers as its A operand, 64 k at a time.
//
// A warpgroup holds 64 output channels, one tile column a warp. It decodes the weights of one step of 64 k while the four products of the
// step before run; sums stay in the same registers over all of a work tile. While the tensor cores are active every integer pipe issues at
// half its rate, wherever operands lie, so warps that only decode, or operands in shared memory, gain nothing (docs/notes/kernels-gpu.md).
#pragma once
#include "base/fragments.cuh"
#include "gemm/pipeline.cuh"
#include "base/decode_int8.cuh"
#include "base/wgmma_int8.cuh"

// A shard's weights as operands of the tensor cores. HALF: fp16, the weight itself or for mul1 its sum of bytes; BYTE: mul1 rounded to int8 as
// prefill/int8.cuh defines it, multiplied by activations of one int8.
template <int HALF_BITS, int CODEBOOK, int ARITHMETIC>
struct GemmKind {
    static constexpr int half_bits = HALF_BITS, codebook = CODEBOOK;
    static constexpr bool bytes = ARITHMETIC == BYTE, byte_sums = CODEBOOK == MUL1 && !bytes;
    static constexpr int products = bytes ? 2 : 4;  // of a step of 64 k
    static_assert(!bytes || CODEBOOK == MUL1, "only mul1 weights are affine in an integer");
    using Window = ::Window<HALF_BITS>;
    using Sum = typename ::Sum<ARITHMETIC>::type;
};
// Bytes of a token's activations of a k block.
template <class K> constexpr u32 token_bytes = K::bytes ? GEMM_BLOCK_K : 2 * GEMM_BLOCK_K;

// States P and P + 1 of a lane's 32 as two fp16, of k and k + 1 of its k-tile.
template <class K, int P, u32 k>
__device__ __forceinline__ u32 decode_operand(const u32 (&words)[K::Window::words]) {
    using W = typename K::Window;
    const u32 first = W::template get<P>(words), second = W::template get<P + 1>(words);
    if constexpr (K::byte_sums)
        return small_byte_sums<complemented(k), complemented(k + 1)>(product_word<MUL1, W::twice>(first), product_word<MUL1, W::twice>(second));
    else return decode_pair<K::codebook, W::twice>(first, second);
}
// The A operand of product I of a step.
template <class K, int I>
__device__ __forceinline__ void decode_product(u32 (&a)[4], const u32 (&words)[K::Window::words]) {
    if constexpr (K::bytes) {
        decode_bytes_step<K, I>(a, words);
    } else {
        a[0] = decode_operand<K, 8 * I, 2 * I>(words);
        a[1] = decode_operand<K, 8 * I + 4, 2 * I>(words);
        a[2] = decode_operand<K, 8 * I + 2, 2 * I + 8>(words);
        a[3] = decode_operand<K, 8 * I + 6, 2 * I + 8>(words);
    }
}
template <class K>
__device__ __forceinline__ void decode_products(u32 (&a)[K::products][4], const u32 (&words)[K::Window::words]) {
    decode_product<K, 0>(a[0], words), decode_product<K, 1>(a[1], words);
    if constexpr (K::products == 4) decode_product<K, 2>(a[2], words), decode_product<K, 3>(a[3], words);
}

// The lane's words of step STEP of the k block in the pipeline.
template <class K, int STEP>
__device__ __forceinline__ void load_step(u32 (&words)[K::Window::words], u32 stage, int warp, int lane) {
    constexpr u32 tile_bytes = 4 * K::Window::tile_words, row_bytes = 16 * tile_bytes + ROW_PAD;
    load_words<K::half_bits>(words, SharedWords{stage + (4 * STEP + (lane & 3)) * row_bytes + warp * tile_bytes}, lane);
}

// Starts COUNT products and waits for those before them. `words` are decoded after it. `b`: the low word of B's descriptor,
// whose address moves without a carry.
template <class K, int TOKENS, int COUNT>
__device__ __forceinline__ void multiply_step(typename K::Sum (&sums)[TOKENS / 2], u32 (&a)[COUNT][4], u32 b, u32 (&words)[K::Window::words]) {
    // All of A must be there before the fence: decoding that the compiler moves behind it makes ptxas add waits (C7519).
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
    warpgroup_fence();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const u64 descriptor = matrix_descriptor<0>(0) | (b + 2 * i * TOKENS);
        if constexpr (K::bytes) WarpgroupByteMma<TOKENS>::run(sums, a[i], descriptor);
        else WarpgroupMma<TOKENS>::run(sums, a[i], descriptor);
    }
    warpgroup_commit();
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
#pragma unroll
    for (int i = 0; i < K::Window::words; ++i) asm volatile("" : "+r"(words[i]));
}

// Waits for the last products, and releases their k block.
template <class K, int TOKENS>
__device__ __forceinline__ void finish_products(typename K::Sum (&sums)[TOKENS / 2], u32 release, int lane) {
    warpgroup_wait();
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {  // else additions move ahead of the wait
        if constexpr (K::bytes) asm volatile("" : "+r"(sums[i])::"memory");
        else asm volatile("" : "+f"(sums[i])::"memory");
    }
    if (lane == 0) mbarrier_arrive(release);
}

// sums += the products of `k_blocks` k blocks, of which the pipeline holds the first next.
template <class K, int TOKENS>
__device__ __forceinline__ void multiply_k_blocks(typename K::Sum (&sums)[TOKENS / 2], GemmPipeline& pipeline, u32 k_blocks, int warp, int lane) {
    constexpr u32 STEP = TOKENS * token_bytes<K> / 2 / 16;  // of a descriptor
    u32 even[K::products][4], odd[K::products][4], words[K::Window::words];
    pipeline.wait_full();
    load_step<K, 0>(words, pipeline.stage, warp, lane);
    decode_products<K>(even, words);
    u32 release = 0;  // the barrier of the k block before, whose last products may still run
#pragma unroll 1
    while (true) {
        const u32 b = u32(matrix_descriptor<TOKENS * 16>(pipeline.activations()));
        load_step<K, 1>(words, pipeline.stage, warp, lane);
        multiply_step<K, TOKENS>(sums, even, b, words);
        if (release && lane == 0) mbarrier_arrive(release);
        decode_products<K>(odd, words);
        release = pipeline.empty_barrier();
        pipeline.next();
        if (--k_blocks == 0) {
            multiply_step<K, TOKENS>(sums, odd, b + STEP, words);
            break;
        }
        pipeline.wait_full();
        load_step<K, 0>(words, pipeline.stage, warp, lane);
        multiply_step<K, TOKENS>(sums, odd, b + STEP, words);
        decode_products<K>(even, words);
    }
    finish_products<K, TOKENS>(sums, release, lane);
}

// The same with half of a step's products at once, for which many tokens leave registers.
template <class K, int TOKENS>
__device__ __forceinline__ void multiply_half_steps(typename K::Sum (&sums)[TOKENS / 2], GemmPipeline& pipeline, u32 k_blocks, int warp, int lane) {
    constexpr u32 STEP = TOKENS * token_bytes<K> / 2 / 16, HALF = STEP / 2;  // of a descriptor
    u32 even[2][4], odd[2][4], words[K::Window::words];
    const auto first = [&] { decode_product<K, 0>(even[0], words), decode_product<K, 1>(even[1], words); };
    const auto second = [&] { decode_product<K, 2>(odd[0], words), decode_product<K, 3>(odd[1], words); };
    pipeline.wait_full();
    load_step<K, 0>(words, pipeline.stage, warp, lane);
    first();
    u32 release = 0;  // the barrier of the k block before, whose last products may still run
#pragma unroll 1
    while (true) {
        const u32 b = u32(matrix_descriptor<TOKENS * 16>(pipeline.activations()));
        multiply_step<K, TOKENS>(sums, even, b, words);
        if (release && lane == 0) mbarrier_arrive(release);
        second();
        load_step<K, 1>(words, pipeline.stage, warp, lane);
        multiply_step<K, TOKENS>(sums, odd, b + HALF, words);
        first();
        multiply_step<K, TOKENS>(sums, even, b + STEP, words);
        second();
        release = pipeline.empty_barrier();
        pipeline.next();
        if (--k_blocks == 0) {
            multiply_step<K, TOKENS>(sums, odd, b + STEP + HALF, words);
            break;
        }
        pipeline.wait_full();
        load_step<K, 0>(words, pipeline.stage, warp, lane);
        multiply_step<K, TOKENS>(sums, odd, b + STEP + HALF, words);
        first();
    }
    finish_products<K, TOKENS>(sums, release, lane);
}

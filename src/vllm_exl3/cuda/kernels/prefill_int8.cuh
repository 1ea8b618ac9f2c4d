// The prefill GEMM's fast mode: mul1 weights rounded to int8 and int8 activations, at twice the rate of fp16 products.
//
// w = k_inv·(B - 510.27), B the sum of the product word's bytes. A weight becomes q = floor((B + 3) / 4) - 128, -128..124,
// which stands for 4·k_inv·q: the middle of the four B that share a q is 0.06 of a step off, and nobody corrects that. Sums are
// exact in int32 up to k = 132,000, so bits do not depend on how k is cut.
//
// k is permuted to suit the order in which a lane has its weights: product p, p < 2, of a unit holds in its bytes 4q..4q+3 of
// k the channels 2i, 2i+1, 2i+8, 2i+9 of k-tile q, with i = 2p, and in bytes 16+4q..19+4q those with i = 2p+1. They are the
// ring positions 8i..8i+3 of the one channel of a lane and 8i+4..8i+7 of the other.
#pragma once
#include "prefill.cuh"
#include "prefill_bytes.cuh"
#include "wgmma_int8.cuh"

// As Shape, with activations of one byte.
template <int TOKENS_, int PAIRS_, int CLUSTER_>
struct ByteShape {
    static constexpr int TOKENS = TOKENS_, PAIRS = PAIRS_, CLUSTER = CLUSTER_, STRIPS = PAIRS * CLUSTER;
    static constexpr u32 activation_bytes = TOKENS * UNIT_IN;
};

// As multiply() of prefill.cuh.
template <int TOKENS, int WORDS>
__device__ __forceinline__ void multiply_bytes(int (&sums)[TOKENS / 2], u32 (&a)[4], u32 b, u32 (&words)[WORDS]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
    warpgroup_fence();
    WarpgroupByteMma<TOKENS>::run(sums, a, matrix_descriptor<0>(0) | b);
    warpgroup_commit();
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
#pragma unroll
    for (int i = 0; i < WORDS; ++i) asm volatile("" : "+r"(words[i]));
}

template <class K, int TOKENS, int PAIRS, int CLUSTER>
__device__ __forceinline__ void consume(K, ByteShape<TOKENS, PAIRS, CLUSTER>, PrefillBlock& block, const PrefillSegment& segment) {
    static_assert(K::codebook == MUL1, "other codebooks have no sum of bytes");
    using S = ByteShape<TOKENS, PAIRS, CLUSTER>;
    int products[TOKENS / 2] = {};
    u32 even[4], odd[4], words[K::Window::words];
    UnitRing& ring = block.ring;
    fetch_scales<S>(block, segment);
    mbarrier_wait(ring.full + 8 * ring.slot, ring.phase);
    load_unit<K, PAIRS>(words, block);
    decode_bytes_step<K, 0>(even, words);
    u32 before = 0;  // the empty barrier of the unit before, whose last product is still in flight
    for (u32 left = segment.end - segment.begin; left != 0; --left) {
        // In a cluster a shared address names its block above bit 24, where a descriptor has other things.
        const u32 b = u32(matrix_descriptor<TOKENS * 16>((ring.at + block.args.weight_bytes) & 0x3ffff));
        multiply_bytes<TOKENS>(products, even, b, words);
        if (before) release<CLUSTER>(before, block.lane);
        decode_bytes_step<K, 1>(odd, words);
        before = ring.empty + 8 * ring.slot;
        ring.next();
        // Behind the last unit this reads a slot that holds nothing of interest, and nobody uses it.
        if (left > 1) mbarrier_wait(ring.full + 8 * ring.slot, ring.phase);
        load_unit<K, PAIRS>(words, block);
        multiply_bytes<TOKENS>(products, odd, b + 2 * TOKENS, words);
        decode_bytes_step<K, 0>(even, words);
    }
    warpgroup_wait();
    release<CLUSTER>(before, block.lane);
    float sums[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sums[i] = static_cast<float>(products[i]);
    finish_tile<S>(sums, block, segment);
}

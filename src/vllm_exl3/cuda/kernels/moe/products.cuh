// Products of the decode path: states cut out of a tile's words, what the codebook makes of them, and the tensor core.
//
// One pipe cuts and masks, another multiplies, and the first has twice as much to do. So some of its work is done by
// multiplications: where a state is the lower half of a word whose upper half is another, its product is the word's less the
// other's, and a shift to the left is a product with a power of two.
#pragma once
#include "base/fragments.cuh"

// A product word begins as state·multiplier + addend.
template <int CODEBOOK> struct Product;
template <> struct Product<MUL1> { static constexpr u32 multiplier = MUL1_MULTIPLIER, addend = 0; };
template <> struct Product<MCG> { static constexpr u32 multiplier = MCG_MULTIPLIER, addend = 0; };
template <> struct Product<INST3> { static constexpr u32 multiplier = INST3_MULTIPLIER, addend = INST3_ADDEND; };

// Where the bytes of position P lie in the word that it is cut out of: every third state of equal start mod 8 begins one.
template <class W, int P>
struct StateBytes {
    static constexpr int bit = W::start(P), offset = bit % 32, byte = bit / 8;
    static constexpr int place = bit % 8 == 0 ? offset / 8 : (byte - W::start(0) / 8) % 3;
    static constexpr int begin = bit - 8 * place;                             // of the word, in the bit string
    static constexpr int before = P - 16 / (W::start(1) - W::start(0));       // whose state is the 16 bits before
};

// state·multiplier + addend of position P.
template <class K, int P>
__device__ __forceinline__ u32 product_at(const u32 (&words)[K::Window::words]) {
    using W = typename K::Window;
    constexpr u32 multiplier = Product<K::codebook>::multiplier, addend = Product<K::codebook>::addend;
    if constexpr (K::codebook == MUL1 && W::twice && K::half_bits >= 8) {
        return product_word<MUL1, true>(W::template get<P>(words));  // a permute for each state leaves least to do
    } else if constexpr (W::byte_aligned) {
        using C = StateBytes<W, P>;
        const u32 word = W::template string_at<C::begin>(words);
        if constexpr (C::place == 0) return multiply_add(word >> 16, multiplier, addend);
        else if constexpr (C::place == 2 && C::before >= 0)
            return multiply_add(product_at<K, C::before>(words), 0xffff0000u, multiply_add(word, multiplier, addend + (addend << 16)));
        else return multiply_add(W::template two_bytes_twice<C::place>(word, words[C::begin / 32 + 1 < W::words ? C::begin / 32 + 1 : 0]),
                                 multiplier - (multiplier << 16), addend);
    } else {
        constexpr int offset = W::start(P) % 32;
        const u32 word = words[W::start(P) / 32];
        if constexpr (offset == 0) return multiply_add(word >> 16, multiplier, addend);
        else if constexpr (offset < 16) return multiply_add(multiply_add(word, 1u << offset, 0) >> 16, multiplier, addend);
        else if constexpr (offset == 16) return multiply_add(word & 0xffffu, multiplier, addend);
        else return multiply_add(W::template string_at<W::start(P) - 16>(words) & 0xffffu, multiplier, addend);
    }
}

// The operand of the tensor core.
template <class K, int P>
__device__ __forceinline__ u32 operand_at(const u32 (&words)[K::Window::words]) {
    const u32 product = product_at<K, P>(words);
    return K::codebook == MUL1 ? product : halves_of(product);
}

template <class K, int I, int H>
__device__ __forceinline__ void multiply_step(typename Sum<K::arithmetic>::type (&sums)[K::columns][4],
                                              const u32 (&words)[K::Window::words],
                                              const u32 (&b)[K::columns][K::matrices]) {
    u32 a[4];
    if constexpr (K::arithmetic == HALF) {
        decode_step<K, I>(a, words);
    } else {
        a[0] = operand_at<K, 8 * I + 2 * H>(words);
        a[1] = operand_at<K, 8 * I + 4 + 2 * H>(words);
        a[2] = operand_at<K, 8 * I + 2 * H + 1>(words);
        a[3] = operand_at<K, 8 * I + 5 + 2 * H>(words);
    }
    constexpr int matrix = K::arithmetic == HALF ? 2 * I : 2 * (2 * I + H);
#pragma unroll
    for (int group = 0; group < K::columns; ++group) {
        if constexpr (K::arithmetic == INTEGER) mma_integer(sums[group], a, b[group][matrix], b[group][matrix + 1]);
        else mma_half(sums[group], a, b[group][matrix], b[group][matrix + 1]);
    }
}

// One tile column: 64 k × 16 output channels.
template <class K>
__device__ __forceinline__ void multiply_tile(typename Sum<K::arithmetic>::type (&sums)[K::columns][4],
                                              const u32 (&words)[K::Window::words],
                                              const u32 (&b)[K::columns][K::matrices]) {
    multiply_step<K, 0, 0>(sums, words, b);
    if constexpr (K::arithmetic != HALF) multiply_step<K, 0, 1>(sums, words, b);
    multiply_step<K, 1, 0>(sums, words, b);
    if constexpr (K::arithmetic != HALF) multiply_step<K, 1, 1>(sums, words, b);
    multiply_step<K, 2, 0>(sums, words, b);
    if constexpr (K::arithmetic != HALF) multiply_step<K, 2, 1>(sums, words, b);
    multiply_step<K, 3, 0>(sums, words, b);
    if constexpr (K::arithmetic != HALF) multiply_step<K, 3, 1>(sums, words, b);
}

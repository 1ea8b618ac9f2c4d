// From tiles in shared memory to tensor-core fragments, and the products themselves.
//
// The four lanes of a quad own the same output channels of four different k-tiles (q = lane & 3), so one step covers
// 64 k × 16 channels. k is permuted by that, in the same way on both operands:
//   INTEGER, PAIR: product (i, h), i < 4, h < 2: k-slots of lane q are k = 2i + 8h and 2i + 8h + 1 of its k-tile;
//   HALF:          product i: k-slots of lane q are k = 2i, 2i+1, 2i+8, 2i+9 of its k-tile.
#pragma once
#include "codebook.cuh"
#include "mma.cuh"
#include "window.cuh"

template <int HALF_BITS, int CODEBOOK, int ARITHMETIC, int TILE_ROWS>
struct Kind {
    static constexpr int half_bits = HALF_BITS, codebook = CODEBOOK, arithmetic = ARITHMETIC, tile_rows = TILE_ROWS;
    // Groups of 8 columns of B: INTEGER takes two columns a token.
    static constexpr int columns = ARITHMETIC == INTEGER ? TILE_ROWS / 4 : TILE_ROWS < 8 ? 1 : TILE_ROWS / 8;
    static constexpr int matrices = ARITHMETIC == HALF ? 8 : 16;
    static constexpr bool byte_sums = ARITHMETIC == HALF && CODEBOOK == MUL1;  // decode_byte_sums serves
    using Window = ::Window<HALF_BITS>;
};
template <int ARITHMETIC> struct Sum { using type = float; };
template <> struct Sum<INTEGER> { using type = int; };
template <> struct Sum<BYTE> { using type = int; };

struct SharedWords {
    u32 address;
    __device__ __forceinline__ u32 one(int index) const {
        u32 word;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address + 4 * index) : "memory");
        return word;
    }
    // COUNT consecutive words from `first`, in the widest loads that their alignment allows.
    template <int COUNT>
    __device__ __forceinline__ void run(u32 (&words)[COUNT], int first) const {
        const u32 at = address + 4 * first;
        if constexpr (COUNT % 4 == 0) {
#pragma unroll
            for (int i = 0; i < COUNT; i += 4)
                asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(words[i]), "=r"(words[i + 1]),
                             "=r"(words[i + 2]), "=r"(words[i + 3]) : "r"(at + 4 * i) : "memory");
        } else if constexpr (COUNT % 2 == 0) {
#pragma unroll
            for (int i = 0; i < COUNT; i += 2)
                asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(words[i]), "=r"(words[i + 1])
                             : "r"(at + 4 * i) : "memory");
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) words[i] = one(first + i);
        }
    }
};

// HALF: the A operand of product i.
template <class K, int I>
__device__ __forceinline__ void decode_step(u32 (&a)[4], const u32 (&words)[K::Window::words]) {
    using W = typename K::Window;
    a[0] = decode_pair<K::codebook, W::twice>(W::template get<8 * I>(words), W::template get<8 * I + 1>(words));
    a[1] = decode_pair<K::codebook, W::twice>(W::template get<8 * I + 4>(words), W::template get<8 * I + 5>(words));
    a[2] = decode_pair<K::codebook, W::twice>(W::template get<8 * I + 2>(words), W::template get<8 * I + 3>(words));
    a[3] = decode_pair<K::codebook, W::twice>(W::template get<8 * I + 6>(words), W::template get<8 * I + 7>(words));
}

template <class K, int I, int H>
__device__ __forceinline__ void multiply_step(typename Sum<K::arithmetic>::type (&sums)[K::columns][4],
                                              const u32 (&words)[K::Window::words],
                                              const u32 (&b)[K::columns][K::matrices]) {
    using W = typename K::Window;
    u32 a[4];
    if constexpr (K::arithmetic == HALF) {
        decode_step<K, I>(a, words);
    } else {
        a[0] = product_word<K::codebook, W::twice>(W::template get<8 * I + 2 * H>(words));
        a[1] = product_word<K::codebook, W::twice>(W::template get<8 * I + 4 + 2 * H>(words));
        a[2] = product_word<K::codebook, W::twice>(W::template get<8 * I + 2 * H + 1>(words));
        a[3] = product_word<K::codebook, W::twice>(W::template get<8 * I + 5 + 2 * H>(words));
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

// From tiles in shared memory to tensor-core fragments, and the products themselves.
//
// The four lanes of a quad own the same output channels of four different k-tiles (q = lane & 3), so one step covers
// 64 k × 16 channels. k is permuted by that, in the same way on both operands:
//   INTEGER, PAIR: product (i, h), i < 4, h < 2: k-slots of lane q are k = 2i + 8h and 2i + 8h + 1 of its k-tile;
//   HALF:          product i: k-slots of lane q are k = 2i, 2i+1, 2i+8, 2i+9 of its k-tile.
#pragma once
#include "base/codebook.cuh"
#include "base/mma.cuh"
#include "base/window.cuh"

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

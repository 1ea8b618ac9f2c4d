// Decoding mul1 weights to int8, as prefill/int8.cuh defines them, in the order of the A operand of MMAs on bytes.
#pragma once
#include "base/codebook.cuh"
#include "base/window.cuh"

constexpr u32 BYTE_BIAS = 3 + 4 * 128;  // floor((B + 3) / 4) - 128 is bits 2..9 of B + 3 + 512

// Two product words to two weights, in bytes 1 and 3; bytes 0 and 2 hold nothing of interest. The two sums of bytes go to
// different pipes: the integer dot product to FMA, already times 64, the absolute differences to ALU.
__device__ __forceinline__ u32 weight_bytes(u32 first, u32 second) {
    const u32 low = __dp4a(first, 0x40404040u, 64 * BYTE_BIAS);
    u32 high, both;
    asm("vabsdiff4.u32.u32.u32.add %0, %1, %2, %3;" : "=r"(high) : "r"(second), "r"(0u), "r"(BYTE_BIAS));
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(both) : "r"(high), "r"(1u << 22), "r"(low));
    return both;
}

// The weights of ring positions P..P+3, one a byte.
template <class W, int P>
__device__ __forceinline__ u32 decode_bytes(const u32 (&words)[W::words]) {
    const u32 x0 = product_word<MUL1, W::twice>(W::template get<P>(words));
    const u32 x1 = product_word<MUL1, W::twice>(W::template get<P + 1>(words));
    const u32 x2 = product_word<MUL1, W::twice>(W::template get<P + 2>(words));
    const u32 x3 = product_word<MUL1, W::twice>(W::template get<P + 3>(words));
    return __byte_perm(weight_bytes(x0, x1), weight_bytes(x2, x3), 0x7531);
}

// The A operand of product P of a k block.
template <class K, int P>
__device__ __forceinline__ void decode_bytes_step(u32 (&a)[4], const u32 (&words)[K::Window::words]) {
    a[0] = decode_bytes<typename K::Window, 16 * P>(words);
    a[1] = decode_bytes<typename K::Window, 16 * P + 4>(words);
    a[2] = decode_bytes<typename K::Window, 16 * P + 8>(words);
    a[3] = decode_bytes<typename K::Window, 16 * P + 12>(words);
}

// The three codebooks: from a 16-bit state to what a tensor core multiplies.
//
// INTEGER (mul1): w = k_inv·(b0+b1+b2+b3) + c, b the bytes of the product word. The word itself is four consecutive k of
//                 an int8 MMA whose activation is repeated over them: the tensor core adds the bytes. Exact.
// PAIR (mcg, 3INST): w = lo + hi, the two halves of the masked product word: two consecutive k of an fp16 MMA.
// BYTE (mul1):    INTEGER with activations of one int8, for the fast mode.
// HALF (all):     the weight itself in fp16, rounded as the format defines it, two weights a register.
#pragma once
#include "base/types.cuh"

enum Codebook : int { INST3 = 0, MCG = 1, MUL1 = 2 };
enum Arithmetic : int { INTEGER = 0, PAIR = 1, HALF = 2, BYTE = 3 };

constexpr int MUL1_SCALE_18 = 1774;       // k_inv = 1774·2^-18, fp16 0x1EEE
constexpr int MUL1_OFFSET_18 = -905216;   // 1024·k_inv + k_bias = -3.453125 = -905216·2^-18

constexpr float MUL1_SCALE = MUL1_SCALE_18 / 262144.0f, MUL1_BIAS = -10.3828125f;  // k_inv; k_bias, fp16 0xC931
constexpr float BYTE_STEP = 4.0f * MUL1_SCALE;                                     // of a weight that is rounded to int8
constexpr float LARGEST_INTEGER = 16256.0f, LARGEST_BYTE = 127.0f;                 // of activations: 127·128 in two int8, or one

constexpr u32 MUL1_MULTIPLIER = 0x83DCD12Du, MCG_MULTIPLIER = 0xCBAC1FEDu, INST3_MULTIPLIER = 89226354u, INST3_ADDEND = 64248484u;

// The two fp16 that mcg and 3INST make of a product.
__device__ __forceinline__ u32 halves_of(u32 x) {
    u32 halves;  // (x & mask) ^ bits in one instruction: the compiler makes two of it, because each takes one immediate
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(halves) : "r"(x), "r"(0x8FFF8FFFu), "r"(0x3B603B60u));
    return halves;
}

// A state that stands in both halves of its word (TWICE) is s·(1 + 2^16), which its multiplier times 1 - 2^16 undoes modulo 2^32.
template <int CODEBOOK, bool TWICE = false>
__device__ __forceinline__ u32 product_word(u32 state) {
    constexpr u32 once = CODEBOOK == MUL1 ? MUL1_MULTIPLIER : CODEBOOK == MCG ? MCG_MULTIPLIER : INST3_MULTIPLIER;
    constexpr u32 multiplier = TWICE ? once - (once << 16) : once;
    if constexpr (CODEBOOK == MUL1) return state * multiplier;
    return halves_of(CODEBOOK == MCG ? state * multiplier : state * multiplier + INST3_ADDEND);
}

// Two product words of the other codebooks to two fp16 weights.
__device__ __forceinline__ u32 sum_of_halves(u32 x, u32 y) {
    const u32 low = __byte_perm(x, y, 0x5410), high = __byte_perm(x, y, 0x7632);
    u32 weights;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(weights) : "r"(low), "r"(high));
    return weights;
}

// Two states to two fp16 weights, the first in the low half.
template <int CODEBOOK, bool TWICE = false>
__device__ __forceinline__ u32 decode_pair(u32 first, u32 second) {
    const u32 x = product_word<CODEBOOK, TWICE>(first), y = product_word<CODEBOOK, TWICE>(second);
    u32 weights;
    if constexpr (CODEBOOK == MUL1) {
        // 0x6400 + B is the fp16 number 1024 + B; one fused multiply-add rounds once, as the format asks.
        // The two byte sums go to different pipes: the integer dot product to FMA, the absolute differences to ALU.
        const u32 low = __dp4a(x, 0x01010101u, 0x6400u);
        u32 high;
        asm("vabsdiff4.u32.u32.u32.add %0, %1, %2, %3;" : "=r"(high) : "r"(y), "r"(0u), "r"(0x6400u));
        const u32 sums = __byte_perm(low, high, 0x5410);
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(weights) : "r"(sums), "r"(0x1EEE1EEEu), "r"(0xC931C931u));
    } else {
        weights = sum_of_halves(x, y);
    }
    return weights;
}

// Two mul1 product words to two fp16 numbers 1024 + B, B the byte sums, exact. For kernels that account for the offset elsewhere.
__device__ __forceinline__ u32 byte_sums(u32 x, u32 y) {
    const u32 low = __dp4a(x, 0x01010101u, 0x6400u);
    u32 high, both;
    asm("vabsdiff4.u32.u32.u32.add %0, %1, %2, %3;" : "=r"(high) : "r"(y), "r"(0u), "r"(0x6400u));
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(both) : "r"(high), "r"(0x10000u), "r"(low));
    return both;
}
template <bool TWICE>
__device__ __forceinline__ u32 decode_byte_sums(u32 first, u32 second) {
    return byte_sums(product_word<MUL1, TWICE>(first), product_word<MUL1, TWICE>(second));
}

// Byte sums as operands of fp16 products, for kernels that account for the codebook's offset elsewhere: an integer up to 1020 read as
// the bits of an fp16 number is that integer times 2^-24, exactly (a subnormal number, which tensor cores multiply at full rate).
//
// Sums of such products hold 510·Σa besides what is wanted, which costs accuracy where the activations of a row have a common sign: one
// large channel of x whose rotation is constant. So some k have 1020 - B in place of B and -a in place of a, which turns their part of
// the offset around. Which ones, is a bent function of the lowest four bits of k: no rotated channel is closer to it than 1/4 of its length.
__device__ __forceinline__ constexpr bool complemented(u32 k) { return ((k & k >> 1) ^ (k >> 2 & k >> 3)) & 1; }

constexpr float BYTE_SUM_SCALE = MUL1_SCALE_18 * 64.0f;  // k_inv·2^24: from sums of products of byte sums to sums of products of weights
constexpr float BYTE_SUM_OFFSET = MUL1_OFFSET_18 / 262144.0f, COMPLEMENT_OFFSET = 1020.0f * MUL1_SCALE_18 / 262144.0f;

// Byte sums of two mul1 product words, or 1020 less them, in two halves of a word. They go to different pipes, as in `decode_pair`.
template <bool FIRST, bool SECOND>
__device__ __forceinline__ u32 small_byte_sums(u32 x, u32 y) {
    u32 low, high, both;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(low) : "r"(x), "r"(FIRST ? 0xffffffffu : 0x01010101u), "r"(FIRST ? 1020u : 0u));
    asm("vabsdiff4.u32.u32.u32.add %0, %1, %2, %3;" : "=r"(high) : "r"(y), "r"(SECOND ? 0xffffffffu : 0u), "r"(0u));
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(both) : "r"(high), "r"(0x10000u), "r"(low));
    return both;
}

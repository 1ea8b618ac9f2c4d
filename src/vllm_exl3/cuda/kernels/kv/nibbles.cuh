// Nibbles to float16 by bit tricks, and the copies that bring them.
#pragma once
#include "base/cp_async.cuh"

// 0x6400 is 1024 in float16, whose step there is 1: 1024 + nibble J of each half for even J, 1024 + 16·nibble for odd.
template <int J>
__device__ __forceinline__ u32 raised_nibbles(u32 word) {
    constexpr u32 mask = J & 1 ? 0x00f000f0u : 0x000f000fu;
    u32 value;  // (word & mask) ^ 0x64006400 in one instruction; the compiler makes two of it
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(value) : "r"(J < 2 ? word : word >> 8), "n"(mask), "r"(0x64006400u));
    return value;
}

// Nibble J of each half minus that token's zero-point, exactly. Sums of values that are centred stay small: sums of raised ones,
// a correction taken off afterwards, would drift over long contexts, since tensor cores truncate when they add.
// `shift` is what `zero_shift<J & 1>` gives for the two tokens.
template <int J>
__device__ __forceinline__ u32 centred_nibbles(u32 word, u32 shift) {
    u32 value;
    if constexpr (J & 1)
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(value) : "r"(raised_nibbles<J>(word)), "r"(0x2c002c00u), "r"(shift));
    else
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(value) : "r"(raised_nibbles<J>(word)), "r"(shift));
    return value;
}
template <int ODD>
__device__ __forceinline__ u16 zero_shift(u32 zero_point) { return float_to_half(-(ODD ? 64.0f : 1024.0f) - float(zero_point)); }

__device__ __forceinline__ float power_of_two(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}
__device__ __forceinline__ float binary_logarithm(float x) {
    float value;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}
__device__ __forceinline__ float reciprocal(float x) {
    float value;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

__device__ __forceinline__ u32 load_word(u32 address) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}
__device__ __forceinline__ void load_words(u32& a, u32& b, u32 address) {
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_words(u32 (&words)[4], u32 address) {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void store_half(u32 address, u16 value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

template <int BYTES>
__device__ __forceinline__ void start_copy(u32 target, const u8* source) {
    if constexpr (BYTES == 16) cp_async_16(target, source);
    else cp_async_8(target, source);
}

// Fixed-width names, bit casts and dtype conversion, so that kernels compile by NVRTC with no header at all.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Element types of x, out and bias; `ELEMENTS` of vllm_exl3/cuda/binding.py has the same values.
enum Element : u32 { F16 = 0, BF16 = 1, F32 = 2 };

__device__ __forceinline__ float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ u16 float_to_bfloat(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ float load_element(const void* base, i64 index, u32 type) {
    if (type == F32) return static_cast<const float*>(base)[index];
    const u16 bits = static_cast<const u16*>(base)[index];
    return type == F16 ? half_to_float(bits) : __uint_as_float(u32(bits) << 16);
}

__device__ __forceinline__ void store_element(void* base, i64 index, u32 type, float value) {
    if (type == F32) static_cast<float*>(base)[index] = value;
    else static_cast<u16*>(base)[index] = type == F16 ? float_to_half(value) : float_to_bfloat(value);
}

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// The same value, from which the compiler computes nothing before this point: what it would keep for later takes registers.
template <class T>
__device__ __forceinline__ T rematerialize(T value) {
    asm volatile("" : "+r"(value));
    return value;
}

// a·b + c by the multiplier, where the compiler would make shifts of it.
__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
    u32 d;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// Products of two pairs of fp16.
__device__ __forceinline__ u32 multiply_halves(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

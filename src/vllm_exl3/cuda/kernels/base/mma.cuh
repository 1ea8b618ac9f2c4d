// Tensor-core instructions of sm_80 and later, one wrapper each.
#pragma once
#include "base/types.cuh"

// D = A·B + C, A u8 [16×32] row-major, B s8 [32×8] column-major, C and D s32.
__device__ __forceinline__ void mma_integer(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const int (&c)[4]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
__device__ __forceinline__ void mma_integer(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_integer(d, a, b0, b1, d); }

// D = A·B + C, A f16 [16×16] row-major, B f16 [16×8] column-major, C and D f32.
__device__ __forceinline__ void mma_half(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
__device__ __forceinline__ void mma_half(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_half(d, a, b0, b1, d); }

// Four 8-row matrices of 16-byte rows; lane l gives the address of row l & 7 of matrix l >> 3.
__device__ __forceinline__ void load_matrices(u32& m0, u32& m1, u32& m2, u32& m3, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m0), "=r"(m1), "=r"(m2), "=r"(m3) : "r"(address) : "memory");
}

// Hopper's warpgroup MMA on bytes, sm_90a only: D[64×N] += A[64×32]·B[32×N], A int8 in registers, B int8 in shared memory, D
// int32, exact.
//
// Warp i of the warpgroup holds rows 16i..16i+15: lane (g, q) has of A rows g (a[0], a[2]) and g + 8 (a[1], a[3]), the bytes
// 4q..4q+3 of the first 16 of k in a[0] and a[1], of the other 16 in a[2] and a[3]. D lies as in base/wgmma.cuh, and so does B, of
// which a 16-byte row is 16 of k.
#pragma once
#include "base/wgmma.cuh"

template <int N> struct WarpgroupByteMma;

#define WARPGROUP_BYTE_MMA(N, SUMS, A1, A2, A3, B) \
    template <> \
    struct WarpgroupByteMma<N> { \
        static __device__ __forceinline__ void run(int (&d)[SUMS], const u32 (&a)[4], u64 b) { \
            WGMMA_RUN("m64n" #N "k32.s32.s8.s8", "", "+r", SUMS, A1, A2, A3, B); \
        } \
    };
WARPGROUP_BYTE_MMA(16, 8, 9, 10, 11, 12)
WARPGROUP_BYTE_MMA(24, 12, 13, 14, 15, 16)
WARPGROUP_BYTE_MMA(32, 16, 17, 18, 19, 20)
WARPGROUP_BYTE_MMA(48, 24, 25, 26, 27, 28)
WARPGROUP_BYTE_MMA(64, 32, 33, 34, 35, 36)
WARPGROUP_BYTE_MMA(96, 48, 49, 50, 51, 52)
WARPGROUP_BYTE_MMA(128, 64, 65, 66, 67, 68)
WARPGROUP_BYTE_MMA(192, 96, 97, 98, 99, 100)
WARPGROUP_BYTE_MMA(256, 128, 129, 130, 131, 132)

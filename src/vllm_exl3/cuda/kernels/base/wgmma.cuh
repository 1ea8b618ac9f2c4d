// Hopper's warpgroup MMA, sm_90a only: D[64×N] += A[64×16]·B[16×N], A fp16 in registers, B fp16 in shared memory, D fp32.
//
// Warp i of the warpgroup holds rows 16i..16i+15 in the layout of mma.m16n8k16: lane (g, q) has rows g and g + 8, and of
// every 8 columns j the columns 8j + 2q and 8j + 2q + 1, in d[4j..4j+3].
#pragma once
#include "base/types.cuh"
#include "base/wgmma_operands.cuh"

// B lies as 8×8 matrices of 16-byte rows (8 columns of D × 8 of k), without a swizzle: `k_step` bytes lie between the two
// matrices of one 16-deep step, 128 bytes between neighbouring groups of 8 columns. The address is in the low word, in units
// of 16 bytes, and may be advanced by adding to it.
template <int K_STEP>
__device__ __forceinline__ u64 matrix_descriptor(u32 shared_address) {
    return u64(128 >> 4) << 32 | (shared_address >> 4 | u32(K_STEP >> 4) << 16);
}

__device__ __forceinline__ void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

template <int N> struct WarpgroupMma;

template <>
struct WarpgroupMma<8> {
    // ACCUMULATE: on top of D, which otherwise holds nothing yet.
    template <bool ACCUMULATE = true>
    static __device__ __forceinline__ void run(float (&d)[4], const u32 (&a)[4], u64 b) {
        asm volatile(
            "{\n.reg .pred accumulate;\nsetp.ne.u32 accumulate, %9, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, accumulate, 1, 1, 0;\n}\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(ACCUMULATE)));
    }
};

template <>
struct WarpgroupMma<16> {
    template <bool ACCUMULATE = true>
    static __device__ __forceinline__ void run(float (&d)[8], const u32 (&a)[4], u64 b) {
        asm volatile(
            "{\n.reg .pred accumulate;\nsetp.ne.u32 accumulate, %13, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7}, "
            "{%8, %9, %10, %11}, %12, accumulate, 1, 1, 0;\n}\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
              "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(ACCUMULATE)));
    }
};

// The other widths.
#define WARPGROUP_MMA(N, SUMS, A1, A2, A3, B) \
    template <> \
    struct WarpgroupMma<N> { \
        template <bool ACCUMULATE = true> \
        static __device__ __forceinline__ void run(float (&d)[SUMS], const u32 (&a)[4], u64 b) { \
            if constexpr (ACCUMULATE) WGMMA_RUN("m64n" #N "k16.f32.f16.f16", ", 1, 1, 0", "+f", SUMS, A1, A2, A3, B); \
            else WGMMA_RUN_IF("ne", "m64n" #N "k16.f32.f16.f16", ", 1, 1, 0", "+f", SUMS, A1, A2, A3, B); \
        } \
    };
WARPGROUP_MMA(24, 12, 13, 14, 15, 16)
WARPGROUP_MMA(32, 16, 17, 18, 19, 20)
WARPGROUP_MMA(40, 20, 21, 22, 23, 24)
WARPGROUP_MMA(48, 24, 25, 26, 27, 28)
WARPGROUP_MMA(56, 28, 29, 30, 31, 32)
WARPGROUP_MMA(64, 32, 33, 34, 35, 36)
WARPGROUP_MMA(80, 40, 41, 42, 43, 44)
WARPGROUP_MMA(96, 48, 49, 50, 51, 52)
WARPGROUP_MMA(112, 56, 57, 58, 59, 60)
WARPGROUP_MMA(128, 64, 65, 66, 67, 68)
WARPGROUP_MMA(144, 72, 73, 74, 75, 76)
WARPGROUP_MMA(160, 80, 81, 82, 83, 84)
WARPGROUP_MMA(192, 96, 97, 98, 99, 100)
WARPGROUP_MMA(224, 112, 113, 114, 115, 116)
WARPGROUP_MMA(256, 128, 129, 130, 131, 132)

// The output side of a Hadamard block of many rows: from a pair of warpgroups' accumulators to whole rows, by way of shared
// memory, and the part of H128 that the accumulators' own layout does not serve.
#pragma once
#include "types.cuh"

constexpr u32 STAGED_ROWS = 32;              // rows in shared memory at once
constexpr u32 STAGED_PITCH = 132;            // floats from one to the next
constexpr u32 STAGED_BYTES = STAGED_ROWS * STAGED_PITCH * 4;

__device__ __forceinline__ void store_shared(u32 address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ void load_shared(float (&v)[4], u32 address) {
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(address) : "memory");
}

// The step of channel bit 3, which two accumulators of the same lane hold.
template <int COUNT>
__device__ __forceinline__ void hadamard_own(float (&sums)[COUNT]) {
#pragma unroll
    for (int j = 0; j < COUNT; j += 4) {
        const float a = sums[j], b = sums[j + 1];
        sums[j] = a + sums[j + 2], sums[j + 1] = b + sums[j + 3];
        sums[j + 2] = a - sums[j + 2], sums[j + 3] = b - sums[j + 3];
        asm volatile("" : "+f"(sums[j]), "+f"(sums[j + 1]), "+f"(sums[j + 2]), "+f"(sums[j + 3]));  // one group after the other
    }
}

// Puts a lane's sums of STAGED_ROWS rows, from the FIRST-th on, [row][channel]; `address` is that of its first row and channel.
template <int FIRST, int COUNT>
__device__ __forceinline__ void stage_rows(const float (&sums)[COUNT], u32 address) {
#pragma unroll
    for (u32 j = 0; j < STAGED_ROWS / 8; ++j) {
        const float* d = sums + FIRST / 2 + 4 * j;
        const u32 at = address + 8 * j * STAGED_PITCH * 4;
        store_shared(at, d[0]), store_shared(at + STAGED_PITCH * 4, d[1]);
        store_shared(at + 32, d[2]), store_shared(at + STAGED_PITCH * 4 + 32, d[3]);
    }
}

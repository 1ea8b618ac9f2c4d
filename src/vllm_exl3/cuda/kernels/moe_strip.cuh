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

// The other six steps. A lane has channels 4·(lane & 7) + 32·j + 0..3 of a row, j = 0..3.
__device__ __forceinline__ void hadamard_others(float (&v)[4][4], int lane) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float a = v[j][0] + v[j][1], b = v[j][0] - v[j][1], c = v[j][2] + v[j][3], d = v[j][2] - v[j][3];
        v[j][0] = a + c, v[j][1] = b + d, v[j][2] = a - c, v[j][3] = b - d;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float a = v[0][i] + v[1][i], b = v[0][i] - v[1][i], c = v[2][i] + v[3][i], d = v[2][i] - v[3][i];
        v[0][i] = a + c, v[1][i] = b + d, v[2][i] = a - c, v[3][i] = b - d;
    }
#pragma unroll
    for (int step = 1; step <= 4; step *= 4) {  // channel bits 2 and 4
        const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) v[j][i] = fmaf(sign, v[j][i], __shfl_xor_sync(0xffffffffu, v[j][i], step));
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

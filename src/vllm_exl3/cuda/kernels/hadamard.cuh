// The 128-point Walsh-Hadamard transform of one warp: lane l holds elements 4l..4l+3 in natural order.
#pragma once
#include "types.cuh"

constexpr float HADAMARD_SCALE = 0.08838834764831845f;  // 1/sqrt(128)

// Unscaled: multiply by HADAMARD_SCALE once, where another factor is applied anyway.
__device__ __forceinline__ void hadamard128(float (&v)[4], int lane) {
    const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xffffffffu, v[i], step));
    }
}

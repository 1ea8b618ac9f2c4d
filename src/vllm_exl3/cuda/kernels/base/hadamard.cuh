// The 128-point Walsh-Hadamard transform of one warp: lane l holds elements 4l..4l+3 in natural order.
#pragma once
#include "base/types.cuh"

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

// The step over bit STEP of the index of a lane's own values; all steps from STEP on.
template <int STEP, int COUNT>
__device__ __forceinline__ void butterfly(float (&v)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (!(i & STEP)) {
            const float a = v[i], b = v[i + STEP];
            v[i] = a + b, v[i + STEP] = a - b;
        }
}
template <int STEP, int COUNT>
__device__ __forceinline__ void butterflies(float (&v)[COUNT]) {
    butterfly<STEP>(v);
    if constexpr (2 * STEP < COUNT) butterflies<2 * STEP>(v);
}

// The same of LANES lanes, 8 or 16: vector i of a lane holds elements 8·(lane % LANES) + 8·LANES·i and the seven after. Each
// element comes out with the same bits either way.
template <int LANES, int VALUES>
__device__ __forceinline__ void hadamard128_part(float (&v)[VALUES], int lane) {
    static_assert(LANES * VALUES == 128 && LANES >= 8 && LANES <= 16, "whole vectors of eight");
    butterfly<1>(v), butterfly<2>(v), butterfly<4>(v);
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xffffffffu, v[i], step));
    }
    if constexpr (VALUES == 16) butterfly<8>(v);
}

// Sums and differences of two groups of values, in place.
__device__ __forceinline__ void butterfly(float& low, float& high) {
    const float sum = low + high;
    high = low - high, low = sum;
}
template <class T, int COUNT>
__device__ __forceinline__ void butterfly(T (&low)[COUNT], T (&high)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) butterfly(low[i], high[i]);
}

// An unscaled Hadamard transform over a lane's own eight groups of values.
template <class T>
__device__ __forceinline__ void hadamard8(T (&groups)[8]) {
#pragma unroll
    for (int step = 1; step < 8; step *= 2)
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (!(i & step)) butterfly(groups[i], groups[i + step]);
}

// The input side of one row: A = H(x·suh)/sqrt(128), the row's scale, and the values that the tensor cores multiply.
//
//   INTEGER:    a15 = round(A·16256/max|A|), -16256..16256, later split as 128·high + low with both in int8
//   PAIR, HALF: fp16 of the row scaled by a power of two such that |A| < 2^11; max|A| <= sqrt(128)·max|x·suh| decides it
#pragma once
#include "base/codebook.cuh"
#include "base/hadamard.cuh"

constexpr float HADAMARD_GROWTH = 11.313709f;  // sqrt(128), rounded up

// The bits of the largest magnitude of a lane's values. Bits of magnitudes order as the magnitudes do, and a NaN's are above
// all, so that its row comes out as NaN and not as something plausible.
__device__ __forceinline__ u32 magnitude_bits(const float (&v)[4]) {
    return max(max(__float_as_uint(fabsf(v[0])), __float_as_uint(fabsf(v[1]))),
               max(__float_as_uint(fabsf(v[2])), __float_as_uint(fabsf(v[3]))));
}

struct RowScale {
    float factor;  // from unscaled H(x·suh) to the multiplied values
    float descale;    // from the products' sum to y before the output Hadamard
};

// For fp16, of a row whose A is at most `bound` in magnitude: 2^e > bound, as float bits, and the factor is 2^(11-e) and stays a normal
// number. What undoes it is infinite or NaN where the row is.
__device__ __forceinline__ RowScale half_scale(float bound) {
    const u32 exponent = min(264u - max(1u, __float_as_uint(bound) >> 23 & 0xffu), 253u);
    return {__uint_as_float(exponent << 23) * HADAMARD_SCALE, bound <= 2.9e38f ? __uint_as_float((254u - exponent) << 23) : bound * 1.0e30f};
}

// For int8, of a row whose unscaled H(x·suh) is at most `bound` in magnitude.
__device__ __forceinline__ RowScale byte_scale(float bound) {
    const float factor = 127.0f / bound;
    if (!(factor <= 3.0e38f) && bound <= 1.0f) return {0.0f, 0.0f};  // a row of zeros or subnormals
    return {factor, bound * (HADAMARD_SCALE / 127.0f)};
}

__device__ __forceinline__ RowScale row_scale(u32 arithmetic, u32 bits) {
    const float largest = __uint_as_float(bits);
    if (arithmetic == INTEGER) {
        const float factor = LARGEST_INTEGER / largest;
        if (!(factor <= 3.0e38f) && largest <= 1.0f) return {0.0f, 0.0f};  // a row of zeros or subnormals
        return {largest <= 3.4e38f ? factor : 0.0f, largest * (HADAMARD_SCALE / LARGEST_INTEGER)};
    }
    // 2^e > bound, as float bits; the factor is 2^(11-e) and stays a normal number.
    const u32 bound = __float_as_uint(largest * HADAMARD_GROWTH) >> 23 & 0xffu;
    const u32 exponent = min(264u - max(1u, bound), 253u);
    const float descale = __uint_as_float((254u - exponent) << 23);
    return {__uint_as_float(exponent << 23) * HADAMARD_SCALE, largest <= 2.9e37f ? descale : largest * 1.0e30f};
}

__device__ __forceinline__ u32 half_pair(float first, float second) {
    return float_to_half(first) | u32(float_to_half(second)) << 16;
}

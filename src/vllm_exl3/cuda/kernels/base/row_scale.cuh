// The input side of one row: A = H(x·suh)/sqrt(128), the row's scale, and the values that the tensor cores multiply.
//
//   INTEGER:    a15 = round(A·16256/max|A|), -16256..16256, later split as 128·high + low with both in int8
//   PAIR, HALF: fp16 of the row scaled by a power of two such that |A| < 2^11; max|A| <= sqrt(128)·max|x·suh| decides it
#pragma once
#include "base/codebook.cuh"
#include "base/hadamard.cuh"
#include "wide/arguments.cuh"

constexpr float LARGEST_INTEGER = 16256.0f;  // 127·128
constexpr float HADAMARD_GROWTH = 11.313709f;  // sqrt(128), rounded up

// Up to HELD 128-blocks of a shard's rows, whose loads overlap. `place(i)` says which: {row, block, exists}.
template <int HELD>
struct Batch {
    float v[HELD][4];  // the lane's channels 4·lane .. 4·lane+3

    // x·suh, and with `rotate` H(x·suh) unscaled.
    template <class Place>
    __device__ __forceinline__ void load(const LinearArgs& args, const ShardArgs& shard, bool rotate, int lane, const Place& place) {
        const bool fast = args.x_type != F32 && (args.in_width | args.x_stride) % 4 == 0 && reinterpret_cast<u64>(args.x) % 8 == 0;
        uint2 scales[HELD], raw[HELD] = {};
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const auto at = place(i);
            if (!at.exists) continue;
            const u32 column = at.block * HADAMARD_SIZE + 4 * lane;
            scales[i] = *reinterpret_cast<const uint2*>(shard.suh + column);
            const u16* x = static_cast<const u16*>(args.x) + at.row * args.x_stride + column;
            if (fast && column < args.in_width) raw[i] = *reinterpret_cast<const uint2*>(x);
        }
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const auto at = place(i);
            if (!at.exists) continue;
            const u16 bits[4] = {u16(raw[i].x), u16(raw[i].x >> 16), u16(raw[i].y), u16(raw[i].y >> 16)};
            const u16 suh[4] = {u16(scales[i].x), u16(scales[i].x >> 16), u16(scales[i].y), u16(scales[i].y >> 16)};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                v[i][j] = args.x_type == F16 ? half_to_float(bits[j]) : __uint_as_float(u32(bits[j]) << 16);
            if (!fast) load_any(v[i], args, at.row, at.block * HADAMARD_SIZE + 4 * lane);
#pragma unroll
            for (int j = 0; j < 4; ++j) v[i][j] *= half_to_float(suh[j]);
            if (rotate) hadamard128(v[i], lane);
        }
    }

private:
    // Any dtype, alignment and width.
    static __device__ __forceinline__ void load_any(float (&v)[4], const LinearArgs& args, u32 row, u32 column) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            v[j] = column + j < args.in_width ? load_element(args.x, row * args.x_stride + column + j, args.x_type) : 0.0f;
    }
};

struct BatchPlace {
    u32 row, block;
    bool exists;
};

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

// The input side of one row: A = H(x·suh)/sqrt(128), the row's scale, and the values that the tensor cores multiply.
//
//   INTEGER:    a15 = round(A·16256/max|A|), -16256..16256, later split as 128·high + low with both in int8
//   PAIR, HALF: fp16 of the row scaled by a power of two such that |A| < 2^11; max|A| <= sqrt(128)·max|x·suh| decides it
#pragma once
#include "codebook.cuh"
#include "hadamard.cuh"
#include "problem.cuh"

constexpr float LARGEST_INTEGER = 16256.0f;  // 127·128
constexpr float HADAMARD_GROWTH = 11.313709f;  // sqrt(128), rounded up

// x·suh of the lane's four channels of a 128-block.
__device__ __forceinline__ void load_scaled(float (&v)[4], const LinearArgs& args, const ShardArgs& shard, u32 row, u32 block,
                                            int lane) {
    const u32 column = block * STRIP + 4 * lane;
    const uint2 packed = *reinterpret_cast<const uint2*>(shard.suh + column);
    const i64 at = row * args.x_stride + column;
    const u64 address = reinterpret_cast<u64>(args.x) + at * (args.x_type == F32 ? 4 : 2);
    if (column + 4 <= args.in_width && args.x_type != F32 && address % 8 == 0) {
        const uint2 two = *reinterpret_cast<const uint2*>(address);
        const u16 bits[4] = {u16(two.x), u16(two.x >> 16), u16(two.y), u16(two.y >> 16)};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            v[i] = args.x_type == F16 ? half_to_float(bits[i]) : __uint_as_float(u32(bits[i]) << 16);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = column + i < args.in_width ? load_element(args.x, at + i, args.x_type) : 0.0f;
    }
    v[0] *= half_to_float(u16(packed.x)), v[1] *= half_to_float(u16(packed.x >> 16));
    v[2] *= half_to_float(u16(packed.y)), v[3] *= half_to_float(u16(packed.y >> 16));
}

// The bits of the largest magnitude among the warp's values. Bits of magnitudes order as the magnitudes do, and a NaN's are
// above all, so that its row comes out as NaN and not as something plausible.
__device__ __forceinline__ u32 largest_bits(const float (&v)[4]) {
    return __reduce_max_sync(0xffffffffu, max(max(__float_as_uint(fabsf(v[0])), __float_as_uint(fabsf(v[1]))),
                                              max(__float_as_uint(fabsf(v[2])), __float_as_uint(fabsf(v[3])))));
}

// What one 128-block adds to the search for the row's largest magnitude: |H(x·suh)| unscaled, or the bound's |x·suh|.
__device__ __forceinline__ u32 block_largest(const LinearArgs& args, const ShardArgs& shard, u32 row, u32 block, int lane) {
    float v[4];
    load_scaled(v, args, shard, row, block, lane);
    if (shard.arithmetic == INTEGER) hadamard128(v, lane);
    return largest_bits(v);
}

struct RowScale {
    float factor;  // from unscaled H(x·suh) to the multiplied values
    float undo;    // from the products' sum to y before the output Hadamard
};

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
    const float undo = __uint_as_float((254u - exponent) << 23);
    return {__uint_as_float(exponent << 23) * HADAMARD_SCALE, largest <= 2.9e37f ? undo : largest * 1.0e30f};
}

__device__ __forceinline__ u32 half_pair(float first, float second) {
    return float_to_half(first) | u32(float_to_half(second)) << 16;
}

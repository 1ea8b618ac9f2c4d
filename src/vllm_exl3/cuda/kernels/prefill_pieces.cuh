// The input side of prefill, a lane's part: 16 consecutive channels of one row, which 8 neighbouring lanes rotate together.
#pragma once
#include "prefill_problem.cuh"

constexpr int PIECE = 16;  // consecutive channels of a lane: one k-tile

__device__ __forceinline__ bool loads_vectors(const PrefillArgs& args) {
    return args.x_type != F32 && (args.in_width | args.x_stride) % 8 == 0 && reinterpret_cast<u64>(args.x) % 16 == 0;
}
// Eight stored channels of 16 bits.
__device__ __forceinline__ void unpack(float (&v)[8], const uint4& raw, u32 type) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[2 * i] = type == F16 ? half_to_float(u16(words[i])) : __uint_as_float(words[i] << 16);
        v[2 * i + 1] = type == F16 ? half_to_float(u16(words[i] >> 16)) : __uint_as_float(words[i] & 0xffff0000u);
    }
}

// x·suh of the lane's piece of one 128-block, which begins at `column`.
__device__ __forceinline__ void load_piece(float (&v)[PIECE], const PrefillArgs& args, const uint4 (&raw)[2], const u16* suh, u32 row,
                                           u32 column, bool exists, bool fast) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float x[8], scales[8];
        if (fast) {
            unpack(x, raw[half], args.x_type);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const u32 at = column + 8 * half + i;
                x[i] = exists && at < args.in_width ? load_element(args.x, row * args.x_stride + at, args.x_type) : 0.0f;
            }
        }
        unpack(scales, *reinterpret_cast<const uint4*>(suh + column + 8 * half), F16);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[8 * half + i] = x[i] * scales[i];
    }
}

// Lane q of four gets word q of each of them, in the order of the lanes.
__device__ __forceinline__ uint4 transpose_words(u32 a, u32 b, u32 c, u32 d, int lane) {
    const bool odd = lane & 1, high = lane & 2;
    const u32 from_pair0 = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1), from_pair1 = __shfl_xor_sync(0xffffffffu, odd ? c : d, 1);
    if (odd) a = from_pair0, c = from_pair1;
    else b = from_pair0, d = from_pair1;
    const u32 from_half0 = __shfl_xor_sync(0xffffffffu, high ? a : c, 2), from_half1 = __shfl_xor_sync(0xffffffffu, high ? b : d, 2);
    if (high) a = from_half0, b = from_half1;
    else c = from_half0, d = from_half1;
    return make_uint4(a, b, c, d);
}

// H over 128 values, 16 consecutive ones in each of 8 neighbouring lanes; unscaled.
__device__ __forceinline__ void hadamard_pieces(float (&v)[PIECE], int lane) {
#pragma unroll
    for (int step = 1; step < PIECE; step *= 2)
#pragma unroll
        for (int i = 0; i < PIECE; ++i)
            if (!(i & step)) {
                const float a = v[i], b = v[i + step];
                v[i] = a + b, v[i + step] = a - b;
            }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
        const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < PIECE; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xffffffffu, v[i], step));
    }
}

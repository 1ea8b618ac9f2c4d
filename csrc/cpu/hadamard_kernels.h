// The 128-point Hadamard transform in registers, and how blocks of 128 values get there.
#pragma once

#include "format.h"
#include "kernels.h"
#include "repeat.h"

namespace {

using namespace exl3;

constexpr int BLOCK_VECTORS = BLOCK / LANES;
using BlockVectors = F[BLOCK_VECTORS];

// The unscaled Hadamard transform of 128 values.
EXL3_INLINE inline void rotate(BlockVectors& v) {
    repeat<BLOCK_VECTORS>([&](auto i) EXL3_INLINE { v[i] = hadamard_vector(v[i]); });
    const auto stage = [&](auto stride) EXL3_INLINE {
        repeat<BLOCK_VECTORS>([&](auto i) EXL3_INLINE {
            if constexpr ((i & stride) == 0) {
                const F a = v[i], b = v[i + stride];
                v[i] = add(a, b);
                v[i + stride] = subtract(a, b);
            }
        });
    };
    stage(std::integral_constant<int, 1>{});
    stage(std::integral_constant<int, 2>{});
    stage(std::integral_constant<int, 4>{});
    if constexpr (BLOCK_VECTORS > 8) stage(std::integral_constant<int, 8>{});
}

void hadamard(float* values, int64_t blocks) {
    for (int64_t block = 0; block < blocks; block++) {
        float* at = values + block * BLOCK;
        BlockVectors v;
        repeat<BLOCK_VECTORS>([&](auto i) EXL3_INLINE { v[i] = load_float(at + i * LANES); });
        rotate(v);
        const F scale = splat_float(0.08838834764831845f);
        repeat<BLOCK_VECTORS>([&](auto i) EXL3_INLINE { store_float(at + i * LANES, multiply(v[i], scale)); });
    }
}

template <int DTYPE>
EXL3_INLINE inline F load_as(const void* values, int64_t i) {
    if (DTYPE == FLOAT32) return load_float(static_cast<const float*>(values) + i);
    if (DTYPE == FLOAT16) return load_half(static_cast<const uint16_t*>(values) + i);
    return load_bfloat(static_cast<const uint16_t*>(values) + i);
}

template <int DTYPE>
float load_one(const void* values, int64_t i) {
    if (DTYPE == FLOAT32) return static_cast<const float*>(values)[i];
    const uint16_t bits = static_cast<const uint16_t*>(values)[i];
    return DTYPE == FLOAT16 ? half_to_float(bits) : bfloat_to_float(bits);
}

}  // namespace

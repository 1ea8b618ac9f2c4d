// Activations: scaled, multiplied by suh, rotated, and quantised to int16 a block at a time.
#pragma once

#include "hadamard_kernels.h"

namespace {

using namespace exl3;

// What an integer weight stands for: w ≈ unit · (integer + offset + rest), to 2.3e-4 of the weights'
// root mean square. The rest is the mean over all 65,536 states: an error that all weights share
// would not average out, but gather in the first channel of each rotated block.
template <int CODEBOOK>
struct Units {
    static constexpr float unit = 0x1p-12f;
    static constexpr int offset = 0;
    static constexpr double rest = CODEBOOK == MCG ? -0.1279754638671875 : -0.0612945556640625;
    // |w| < 3.98, so block sums stay below 2^31 while Σ|values| does not exceed this.
    static constexpr float sum_limit = 130900.0f;
};

template <>
struct Units<MUL1> {
    static constexpr float unit = MUL1_SCALE;
    static constexpr int offset = -510;
    static constexpr double rest = -0.26782474281285296;
    static constexpr float sum_limit = 0x1p30f;  // 510 · 32767 · 128 < 2^31: never reached
};

// The bits of the largest magnitude, which order like the magnitudes, with NaN above infinity.
template <int DTYPE>
uint32_t largest_magnitude(const void* x, int64_t in) {
    I largest = splat(0);
    int64_t i = 0;
    for (; i + LANES <= in; i += LANES) largest = maximum(largest, magnitude_bits(load_as<DTYPE>(x, i)));
    uint32_t result = uint32_t(largest_lane(largest));
    for (; i < in; i++) {
        const uint32_t magnitude = float_bits(load_one<DTYPE>(x, i)) & 0x7fffffff;
        result = magnitude > result ? magnitude : result;
    }
    return result;
}

// Columns [k, k + 128) of x, zero from `in` on.
template <int DTYPE>
EXL3_INLINE inline void load_block(const void* x, int64_t in, int64_t k, BlockVectors& v) {
    if (k + BLOCK <= in) {
        repeat<BLOCK_VECTORS>([&](auto i) EXL3_INLINE { v[i] = load_as<DTYPE>(x, k + i * LANES); });
        return;
    }
    float values[BLOCK] = {};
    for (int64_t i = k; i < in; i++) values[i - k] = load_one<DTYPE>(x, i);
    repeat<BLOCK_VECTORS>([&](auto i) EXL3_INLINE { v[i] = load_float(values + i * LANES); });
}

// Of a quantised activation: so that it is 256 · a + b with two signed bytes, as AMX takes it.
constexpr float LARGEST_VALUE = 127 * 256 + 127;

// Quantises the vectors [first, first + those of one quantisation block) of v as block `at` of rows;
// returns scale · Σ values.
template <int CODEBOOK, int FIRST>
EXL3_INLINE inline double quantise(const BlockVectors& v, const Rows& rows, int64_t at) {
    constexpr int size = block_tiles(CODEBOOK) * TILE;
    F largest = splat_float(0), total = splat_float(0);
    repeat<size / LANES>([&](auto i) EXL3_INLINE {
        const F magnitude = absolute(v[FIRST + i]);
        largest = maximum(largest, magnitude);
        total = add(total, magnitude);
    });
    float peak = largest_lane(largest), norm = sum_lanes(total);
    // Below this the block is lost against its row, whose largest input was scaled to [1, 2).
    if (peak < 1e-30f) peak = norm = 1e-30f;
    const float by_peak = LARGEST_VALUE / peak, by_norm = Units<CODEBOOK>::sum_limit / norm;
    const float inverse = by_peak < by_norm ? by_peak : by_norm;
    I sum = splat(0);
    repeat<size / LANES>([&](auto i) EXL3_INLINE {
        const I value = round_to_int(multiply(v[FIRST + i], splat_float(inverse)));
        store_int16(rows.values + at * size + i * LANES, value);
        sum = add(sum, value);
    });
    const int32_t all = sum_lanes(sum);
    rows.scale[at] = 1.0f / inverse;
    rows.offset[at] = Units<CODEBOOK>::offset * all;
    return double(rows.scale[at]) * all;
}

template <int CODEBOOK, int DTYPE>
void prepare_row(const PrepareTask& t) {
    const Rows& rows = t.rows;
    const uint32_t peak = largest_magnitude<DTYPE>(t.x, t.in);
    const bool finite = peak < 0x7f800000;
    // Scaling by a power of two keeps every later product away from overflow and underflow.
    int exponent = int(peak >> 23) - 127;
    exponent = !finite ? 0 : exponent < -126 ? -126 : exponent > 126 ? 126 : exponent;
    const F shrink = splat_float(bits_float(uint32_t(127 - exponent) << 23));
    double sum = 0;
    constexpr int blocks = BLOCK / (block_tiles(CODEBOOK) * TILE);
    for (int64_t k = 0; k < rows.k; k += BLOCK) {
        BlockVectors v;
        // A row with a NaN or an infinity is read as zeros and poisoned below.
        load_block<DTYPE>(t.x, finite ? t.in : 0, k, v);
        repeat<BLOCK_VECTORS>([&](auto i) EXL3_INLINE {
            v[i] = multiply(multiply(v[i], shrink), load_half(t.suh + k + i * LANES));
        });
        rotate(v);
        repeat<blocks>([&](auto i) EXL3_INLINE {
            const int64_t at = (k / BLOCK * blocks + i) * rows.count + t.row;
            sum += quantise<CODEBOOK, i * BLOCK_VECTORS / blocks>(v, rows, at);
        });
    }
    rows.constant[t.row] = finite ? float(Units<CODEBOOK>::rest * sum) : bits_float(0x7fc00000);
    // 1/128 is the scale of the two rotations together.
    rows.gain[t.row] = Units<CODEBOOK>::unit / BLOCK * bits_float(uint32_t(127 + exponent) << 23);
}

template <int CODEBOOK>
void prepare_dtype(const PrepareTask& t) {
    switch (t.dtype) {
        case FLOAT32: return prepare_row<CODEBOOK, FLOAT32>(t);
        case FLOAT16: return prepare_row<CODEBOOK, FLOAT16>(t);
        default: return prepare_row<CODEBOOK, BFLOAT16>(t);
    }
}

void prepare(const PrepareTask& t) {
    switch (t.codebook) {
        case INST3: return prepare_dtype<INST3>(t);
        case MCG: return prepare_dtype<MCG>(t);
        default: return prepare_dtype<MUL1>(t);
    }
}

}  // namespace

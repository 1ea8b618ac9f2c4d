// Activations between an expert's projections, as vllm_exl3/ops/activation.py defines them, in float32.
//
// Plain arithmetic of floats without branches, so that compilers make vectors of the loops around it: with the same
// roundings in every instruction set, an activation has the same bits in all of them.
#pragma once

#include <cstdint>

#include "float16.h"
#include "repeat.h"

namespace {

// Numbers of vllm_exl3.ops.activation.ACTIVATIONS; un-gated ones follow the gated ones.
enum ActivationKind : int {
    SWIGLU,
    SWIGLU_STEP,
    SITU,
    GELU,
    GELU_TANH,
    SILU_UNGATED,
    GELU_UNGATED,
    GELU_TANH_UNGATED,
    RELU2_UNGATED,
    ACTIVATION_COUNT,
};
constexpr bool gated(int kind) { return kind < SILU_UNGATED; }

// NaN stays NaN.
EXL3_INLINE inline float at_most(float x, float limit) { return x > limit ? limit : x; }
EXL3_INLINE inline float at_least(float x, float limit) { return x < limit ? limit : x; }
EXL3_INLINE inline float within(float x, float limit) { return at_least(at_most(x, limit), -limit); }
EXL3_INLINE inline float absolute(float x) { return bits_float(float_bits(x) & 0x7fffffff); }
EXL3_INLINE inline float with_sign(float x, float sign) { return bits_float(float_bits(x) | (float_bits(sign) & 0x80000000)); }

// 2^n for n in [-126, 127], given as a number's bits.
EXL3_INLINE inline float power_of_two(uint32_t n) { return bits_float((n + 127) << 23); }

// Within 2^-23 of the result; zero and infinity at the ends of the range.
EXL3_INLINE inline float exponential(float x) {
    x = at_least(at_most(x, 89.0f), -104.0f);
    // Adding 1.5 · 2^23 leaves the nearest integer in the mantissa.
    const float shifted = x * 1.44269504f + 0x1.8p23f, n = shifted - 0x1.8p23f;
    // log 2 in two parts, of which the first has so few bits that the product is exact.
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.39297e-3f;  // (e^r - 1 - r) / r^2 for |r| up to log(2) / 2
    p = p * r + 8.35989e-3f;
    p = p * r + 4.16665e-2f;
    p = p * r + 1.6666598e-1f;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    // In two steps, since 2^n leaves the range where the result is subnormal or infinite.
    const uint32_t whole = float_bits(shifted) - float_bits(0x1.8p23f);
    const uint32_t half = (whole >> 1) | (whole & 0x80000000);
    return p * power_of_two(half) * power_of_two(whole - half);
}

EXL3_INLINE inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
EXL3_INLINE inline float silu(float x) { return x / (1.0f + exponential(-x)); }

EXL3_INLINE inline float tangent_hyperbolic(float x) {
    const float z = absolute(x), s = x * x;
    const float large = 1.0f - 2.0f / (exponential(2.0f * z) + 1.0f);
    float p = -7.51577e-3f;  // (tanh(z) / z - 1) / z^2 over the interval it is used on
    p = p * s + 2.168073e-2f;
    p = p * s - 5.395735e-2f;
    p = p * s + 1.3333311e-1f;
    p = p * s - 3.3333333e-1f;
    const float small = z + z * (s * p);
    return with_sign(z < 0.4f ? small : large, x);
}

// Within 1.5e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
EXL3_INLINE inline float error_function(float x) {
    const float z = absolute(x), t = 1.0f / (1.0f + 0.3275911f * z);
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    return with_sign(1.0f - p * t * exponential(-z * z), x);
}

EXL3_INLINE inline float gelu(float x) { return 0.5f * x * (1.0f + error_function(0.70710678f * x)); }
EXL3_INLINE inline float gelu_tanh(float x) {
    return 0.5f * x * (1.0f + tangent_hyperbolic(0.79788456f * (x + 0.044715f * (x * x * x))));
}

template <int KIND>
EXL3_INLINE inline float activate(float gate, float up, float alpha, float beta, float limit) {
    if (KIND == SWIGLU) return at_most(gate, limit) * sigmoid(alpha * at_most(gate, limit)) * (within(up, limit) + beta);
    if (KIND == SWIGLU_STEP) return at_most(silu(gate), limit) * within(up, limit);
    if (KIND == SITU) {
        const float soft = beta * tangent_hyperbolic(up / beta);
        return alpha * tangent_hyperbolic(gate / alpha) * sigmoid(gate) * (beta > 0.0f ? soft : up);
    }
    if (KIND == GELU) return gelu(gate) * up;
    if (KIND == GELU_TANH) return gelu_tanh(gate) * up;
    if (KIND == SILU_UNGATED) return silu(up);
    if (KIND == GELU_UNGATED) return gelu(up);
    if (KIND == GELU_TANH_UNGATED) return gelu_tanh(up);
    return up < 0.0f ? 0.0f : up * up;
}

}  // namespace

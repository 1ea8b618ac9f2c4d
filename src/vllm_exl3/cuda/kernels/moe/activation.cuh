// Activations between an expert's projections, in float32: those of vllm_exl3/ops/activation.py.
#pragma once
#include "base/types.cuh"

// The host reads the names (cuda/declarations.py); un-gated ones follow the gated ones.
enum ActivationKind : u32 { SWIGLU = 0, SWIGLU_STEP, SITU, GELU, GELU_TANH, SILU_UNGATED, GELU_UNGATED, GELU_TANH_UNGATED, RELU2_UNGATED };

// By the approximate exponential and reciprocal, which are within 2^-20.
__device__ __forceinline__ float sigmoid(float v) {
    float power, result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
    return result;
}
__device__ __forceinline__ float gelu(float v) { return 0.5f * v * (1.0f + erff(v * 0.70710678118654752f)); }
__device__ __forceinline__ float gelu_tanh(float v) {
    return 0.5f * v * (1.0f + tanhf(0.79788456080286536f * (v + 0.044715f * (v * v * v))));
}
// NaN stays NaN, which fminf and fmaxf would hide.
__device__ __forceinline__ float at_most(float v, float limit) {
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(v), "f"(limit));
    return least;
}
__device__ __forceinline__ float within(float v, float limit) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(at_most(v, limit)), "f"(-limit));
    return most;
}

// Un-gated kinds take `up` alone.
template <u32 KIND>
__device__ __forceinline__ float activate(float gate, float up, float alpha, float beta, float limit) {
    if constexpr (KIND == SWIGLU) {
        gate = at_most(gate, limit), up = within(up, limit);
        return gate * sigmoid(alpha * gate) * (up + beta);
    }
    if constexpr (KIND == SWIGLU_STEP) return at_most(gate * sigmoid(gate), limit) * within(up, limit);
    if constexpr (KIND == SITU) return alpha * tanhf(gate / alpha) * sigmoid(gate) * (beta > 0.0f ? beta * tanhf(up / beta) : up);
    if constexpr (KIND == GELU) return gelu(gate) * up;
    if constexpr (KIND == GELU_TANH) return gelu_tanh(gate) * up;
    if constexpr (KIND == SILU_UNGATED) return up * sigmoid(up);
    if constexpr (KIND == GELU_UNGATED) return gelu(up);
    if constexpr (KIND == GELU_TANH_UNGATED) return gelu_tanh(up);
    return up > 0.0f ? up * up : up != up ? up : 0.0f;
}

template <u32 KIND, int COUNT>
__device__ __forceinline__ void activate_kind(float (&gate)[COUNT], const float (&up)[COUNT], float alpha, float beta, float limit) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) gate[i] = activate<KIND>(gate[i], up[i], alpha, beta, limit);
}

// The result replaces `gate`. One branch for all values.
template <int COUNT>
__device__ __forceinline__ void activate_all(u32 kind, float (&gate)[COUNT], const float (&up)[COUNT], float alpha, float beta, float limit) {
    if (kind == SWIGLU) return activate_kind<SWIGLU>(gate, up, alpha, beta, limit);  // of most models: no indirect branch
    switch (kind) {
        case SWIGLU_STEP: return activate_kind<SWIGLU_STEP>(gate, up, alpha, beta, limit);
        case SITU: return activate_kind<SITU>(gate, up, alpha, beta, limit);
        case GELU: return activate_kind<GELU>(gate, up, alpha, beta, limit);
        case GELU_TANH: return activate_kind<GELU_TANH>(gate, up, alpha, beta, limit);
        case SILU_UNGATED: return activate_kind<SILU_UNGATED>(gate, up, alpha, beta, limit);
        case GELU_UNGATED: return activate_kind<GELU_UNGATED>(gate, up, alpha, beta, limit);
        case GELU_TANH_UNGATED: return activate_kind<GELU_TANH_UNGATED>(gate, up, alpha, beta, limit);
        default: return activate_kind<RELU2_UNGATED>(gate, up, alpha, beta, limit);
    }
}

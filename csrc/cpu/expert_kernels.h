// What routed experts need beside a linear's loops: the activation between projections, and the sum over a token's choices.
#pragma once

#include "activation.h"
#include "finish_kernels.h"

namespace {

using namespace exl3;

template <int KIND>
void activate_kind(const ActivateTask& t) {
    const float alpha = t.alpha, beta = t.beta, limit = t.limit;
    const float* gate = gated(KIND) ? t.gate : t.up;
    float out[BLOCK];
    for (int i = 0; i < t.count; i++) out[i] = activate<KIND>(gate[i], t.up[i], alpha, beta, limit);
    std::memcpy(t.out, out, size_t(t.count) * sizeof(float));
}

void activate(const ActivateTask& t) {
    switch (t.kind) {
        case SWIGLU: return activate_kind<SWIGLU>(t);
        case SWIGLU_STEP: return activate_kind<SWIGLU_STEP>(t);
        case SITU: return activate_kind<SITU>(t);
        case GELU: return activate_kind<GELU>(t);
        case GELU_TANH: return activate_kind<GELU_TANH>(t);
        case SILU_UNGATED: return activate_kind<SILU_UNGATED>(t);
        case GELU_UNGATED: return activate_kind<GELU_UNGATED>(t);
        case GELU_TANH_UNGATED: return activate_kind<GELU_TANH_UNGATED>(t);
        default: return activate_kind<RELU2_UNGATED>(t);
    }
}

void combine(const CombineTask& t) {
    for (int64_t begin = 0; begin < t.count; begin += BLOCK) {
        const int size = int(t.count - begin < BLOCK ? t.count - begin : BLOCK);
        alignas(64) float total[BLOCK] = {};
        for (int64_t term = 0; term < t.terms; term++) {
            if (t.places[term] < 0) continue;
            const float* row = t.values + t.places[term] * t.stride + t.first + begin;
            const float weight = t.weights ? t.weights[term] : 1.0f;
            for (int i = 0; i < size; i++) total[i] += weight * row[i];
        }
        char* out = static_cast<char*>(t.out) + begin * (t.dtype == FLOAT32 ? 4 : 2);
        switch (t.dtype) {
            case FLOAT32: store_block<FLOAT32>(total, size, out); break;
            case FLOAT16: store_block<FLOAT16>(total, size, out); break;
            default: store_block<BFLOAT16>(total, size, out);
        }
    }
}

}  // namespace

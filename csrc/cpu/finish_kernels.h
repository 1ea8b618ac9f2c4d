// Outputs: sums rotated back, multiplied by svh, and cast.
#pragma once

#include "hadamard_kernels.h"

namespace {

using namespace exl3;

template <int DTYPE>
void store_block(const float* values, int size, void* y) {
    if (DTYPE == FLOAT32) {
        std::memcpy(y, values, size_t(size) * sizeof(float));
        return;
    }
    uint16_t out[BLOCK];
    for (int i = 0; i < BLOCK; i += LANES) {
        const F v = load_float(values + i);
        DTYPE == FLOAT16 ? store_half(out + i, v) : store_bfloat(out + i, v);
    }
    std::memcpy(y, out, size_t(size) * sizeof(uint16_t));
}

void finish(const FinishTask& t) {
    float values[BLOCK], out[BLOCK] = {};
    BlockVectors v;
    repeat<BLOCK_VECTORS>(
        [&](auto i) EXL3_INLINE { v[i] = add(load_float(t.sums + i * LANES), splat_float(t.constant)); });
    // The transform commutes with the tile order, which only permutes the bits of the index.
    rotate(v);
    repeat<BLOCK_VECTORS>(
        [&](auto i) EXL3_INLINE { store_float(values + i * LANES, multiply(v[i], splat_float(t.gain))); });
    for (int tile = 0; tile < BLOCK; tile += TILE) {
        for (int i = 0; i < TILE; i++) out[tile + column_of_sum(i)] = values[tile + i];
    }
    repeat<BLOCK_VECTORS>([&](auto i) EXL3_INLINE {
        store_float(values + i * LANES, multiply(load_float(out + i * LANES), load_half(t.svh + i * LANES)));
    });
    // Whole vectors are stored below, so the returned columns move to the front of a full block.
    std::memcpy(out, values + t.first, size_t(t.size) * sizeof(float));
    for (int i = 0; t.bias && i < t.size; i++) {
        out[i] += t.bias_dtype == FLOAT32   ? load_one<FLOAT32>(t.bias, i)
                  : t.bias_dtype == FLOAT16 ? load_one<FLOAT16>(t.bias, i)
                                            : load_one<BFLOAT16>(t.bias, i);
    }
    switch (t.dtype) {
        case FLOAT32: return store_block<FLOAT32>(out, t.size, t.y);
        case FLOAT16: return store_block<FLOAT16>(out, t.size, t.y);
        default: return store_block<BFLOAT16>(out, t.size, t.y);
    }
}

}  // namespace

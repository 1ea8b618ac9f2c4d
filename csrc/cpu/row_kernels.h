// One row of a quantized table, decoded and stored, in loops that become vector code for each instruction set.
#pragma once

#include <algorithm>

#include "float16.h"
#include "kernels.h"
#include "ring_kernels.h"
#include "rows.h"

namespace {

using namespace exl3;

constexpr int PIECE = 256;  // columns that are decoded before they are stored

float load_scale(const void* base, int64_t at, int dtype) {
    if (dtype == FLOAT32) return static_cast<const float*>(base)[at];
    const uint16_t bits = static_cast<const uint16_t*>(base)[at];
    return dtype == FLOAT16 ? half_to_float(bits) : bfloat_to_float(bits);
}

// `values` has room for whole vectors beyond `count`.
void store_row(const exl3_row_call& call, int64_t row, int64_t column, const float* values, int count) {
    const int64_t at = row * call.width + column;
    if (call.dtype == FLOAT32) {
        std::copy_n(values, count, static_cast<float*>(call.out) + at);
        return;
    }
    uint16_t out[PIECE];
    for (int i = 0; i < count; i += LANES) {
        const F v = load_float(values + i);
        call.dtype == FLOAT16 ? store_half(out + i, v) : store_bfloat(out + i, v);
    }
    std::copy_n(out, count, static_cast<uint16_t*>(call.out) + at);
}

// Values as the row codecs define them: rounded to fp16 before any cast.
void round_to_half(float* values, int count) {
    uint16_t halves[LANES];
    for (int i = 0; i < count; i += LANES) {
        store_half(halves, load_float(values + i));
        store_float(values + i, load_half(halves));
    }
}

void int8_row(const exl3_row_call& call, int64_t row, int64_t id) {
    const int8_t* source = static_cast<const int8_t*>(call.table) + id * call.width;
    const float scale = load_scale(call.scales, id, call.scale_dtype);
    for (int64_t first = 0; first < call.width; first += PIECE) {
        float values[PIECE] = {};
        const int count = int(std::min<int64_t>(PIECE, call.width - first));
        for (int i = 0; i < count; i++) values[i] = float(source[first + i]) * scale;
        store_row(call, row, first, values, count);
    }
}

void int4_row(const exl3_row_call& call, int64_t row, int64_t id) {
    const uint8_t* source = static_cast<const uint8_t*>(call.table) + id * ((call.width + 1) / 2);
    for (int64_t group = 0; group < call.groups; group++) {
        float values[INTEGER_GROUP] = {};
        const int64_t first = group * INTEGER_GROUP;
        const int count = int(std::min<int64_t>(INTEGER_GROUP, call.width - first));
        const float scale = load_scale(call.scales, id * call.groups + group, call.scale_dtype);
        for (int i = 0; i < (count + 1) / 2; i++) {
            const int byte = source[first / 2 + i];
            values[2 * i] = float((byte & 15) - 8) * scale;
            values[2 * i + 1] = float((byte >> 4) - 8) * scale;
        }
        store_row(call, row, first, values, count);
    }
}

// The unscaled Hadamard transform in natural order; the same sums in the same order as the reference.
void rotate_ring(float* values) {
    for (int i = 0; i < CODED_WIDTH; i += LANES) store_float(values + i, hadamard_vector(load_float(values + i)));
    for (int stride = LANES; stride < CODED_WIDTH; stride *= 2) {
        for (int i = 0; i < CODED_WIDTH; i += LANES) {
            if (i & stride) continue;
            const F a = load_float(values + i), b = load_float(values + i + stride);
            store_float(values + i, add(a, b));
            store_float(values + i + stride, subtract(a, b));
        }
    }
}

void coded_row(const exl3_row_call& call, int64_t row, int64_t id) {
    const int64_t words = ring_words(CODED_WIDTH, call.bits);
    const uint16_t* rings = static_cast<const uint16_t*>(call.table) + id * call.groups * words;
    const uint16_t* signs = static_cast<const uint16_t*>(call.scales);
    for (int64_t group = 0; group < call.groups; group++) {
        float values[CODED_WIDTH];
        decode_ring<CODED_WIDTH>(rings + group * words, call.bits, values);
        rotate_ring(values);
        const int64_t first = group * CODED_WIDTH;
        for (int i = 0; i < CODED_WIDTH; i += LANES) {
            const F scaled = multiply(load_float(values + i), splat_float(0.0625f));
            store_float(values + i, multiply(scaled, load_half(signs + first + i)));
        }
        round_to_half(values, CODED_WIDTH);
        store_row(call, row, first, values, int(std::min<int64_t>(CODED_WIDTH, call.width - first)));
    }
}

void ngram_row(const exl3_row_call& call, int64_t row, int64_t id) {
    const int64_t words = ring_words(NGRAM_WIDTH, call.bits), place = call.index ? call.index[row] : id;
    float values[NGRAM_WIDTH];
    decode_ring<NGRAM_WIDTH>(static_cast<const uint16_t*>(call.table) + place * words, call.bits, values);
    const int64_t head = std::upper_bound(call.offsets, call.offsets + call.groups, id + call.first_row) - call.offsets;
    const uint16_t* bias = static_cast<const uint16_t*>(call.scales) + std::max<int64_t>(0, head - 1) * NGRAM_WIDTH;
    for (int i = 0; i < NGRAM_WIDTH; i += LANES)
        store_float(values + i, add(load_float(values + i), load_half(bias + i)));
    round_to_half(values, NGRAM_WIDTH);
    store_row(call, row, 0, values, NGRAM_WIDTH);
}

void gather_row(const exl3_row_call& call, int64_t row) {
    static constexpr void (*decoders[])(const exl3_row_call&, int64_t, int64_t) = {
        int8_row, int4_row, coded_row, ngram_row,
    };
    decoders[call.kind](call, row, call.ids[row]);
}

}  // namespace

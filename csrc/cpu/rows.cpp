#include "rows.h"

#include <algorithm>

#include "float16.h"
#include "kernels.h"
#include "parallel.h"
#include "rings.h"

namespace exl3 {
namespace {

constexpr int PIECE = 256;           // columns that are decoded before they are stored
constexpr int INTEGER_GROUP = 128;   // columns of int4 that share a scale
constexpr int64_t ROWS_AT_ONCE = 4;  // rows of one unit of work

float load(const void* base, int64_t at, int dtype) {
    if (dtype == FLOAT32) return static_cast<const float*>(base)[at];
    const uint16_t bits = static_cast<const uint16_t*>(base)[at];
    return dtype == FLOAT16 ? half_to_float(bits) : bfloat_to_float(bits);
}

void store(const exl3_row_call& call, int64_t row, int64_t column, const float* values, int count) {
    const int64_t at = row * call.width + column;
    if (call.dtype == FLOAT32) {
        std::copy_n(values, count, static_cast<float*>(call.out) + at);
    } else if (call.dtype == FLOAT16) {
        uint16_t* out = static_cast<uint16_t*>(call.out) + at;
        for (int i = 0; i < count; i++) out[i] = float_to_half(values[i]);
    } else {
        uint16_t* out = static_cast<uint16_t*>(call.out) + at;
        for (int i = 0; i < count; i++) out[i] = float_to_bfloat(values[i]);
    }
}

void int8_row(const exl3_row_call& call, int64_t row, int64_t id) {
    const int8_t* source = static_cast<const int8_t*>(call.table) + id * call.width;
    const float scale = load(call.scales, id, call.scale_dtype);
    for (int64_t first = 0; first < call.width; first += PIECE) {
        float values[PIECE];
        const int count = int(std::min<int64_t>(PIECE, call.width - first));
        for (int i = 0; i < count; i++) values[i] = float(source[first + i]) * scale;
        store(call, row, first, values, count);
    }
}

void int4_row(const exl3_row_call& call, int64_t row, int64_t id) {
    const uint8_t* source = static_cast<const uint8_t*>(call.table) + id * ((call.width + 1) / 2);
    for (int64_t group = 0; group < call.groups; group++) {
        float values[INTEGER_GROUP];
        const int64_t first = group * INTEGER_GROUP;
        const int count = int(std::min<int64_t>(INTEGER_GROUP, call.width - first));
        const float scale = load(call.scales, id * call.groups + group, call.scale_dtype);
        for (int i = 0; i < count; i++) {
            const int byte = source[(first + i) / 2];
            values[i] = float((i & 1 ? byte >> 4 : byte & 15) - 8) * scale;
        }
        store(call, row, first, values, count);
    }
}

// The unscaled Hadamard transform in natural order; the same sums in the same order as the reference.
void rotate(float (&values)[CODED_WIDTH]) {
    for (int stride = 1; stride < CODED_WIDTH; stride *= 2) {
        for (int first = 0; first < CODED_WIDTH; first += 2 * stride) {
            for (int i = first; i < first + stride; i++) {
                const float a = values[i], b = values[i + stride];
                values[i] = a + b;
                values[i + stride] = a - b;
            }
        }
    }
}

void coded_row(const exl3_row_call& call, int64_t row, int64_t id) {
    const int64_t words = ring_words(CODED_WIDTH, call.bits);
    const uint16_t* rings = static_cast<const uint16_t*>(call.table) + id * call.groups * words;
    const uint16_t* signs = static_cast<const uint16_t*>(call.scales);
    for (int64_t group = 0; group < call.groups; group++) {
        float values[CODED_WIDTH];
        decode_ring(rings + group * words, CODED_WIDTH, call.bits, values);
        rotate(values);
        const int64_t first = group * CODED_WIDTH;
        const int count = int(std::min<int64_t>(CODED_WIDTH, call.width - first));
        // Rounded to fp16 before the cast, as the format has it.
        for (int i = 0; i < count; i++)
            values[i] = half_to_float(float_to_half(values[i] * 0.0625f * half_to_float(signs[first + i])));
        store(call, row, first, values, count);
    }
}

void ngram_row(const exl3_row_call& call, int64_t row, int64_t id) {
    const int64_t words = ring_words(NGRAM_WIDTH, call.bits), place = call.index ? call.index[row] : id;
    float values[NGRAM_WIDTH];
    decode_ring(static_cast<const uint16_t*>(call.table) + place * words, NGRAM_WIDTH, call.bits, values);
    const int64_t head = std::upper_bound(call.offsets, call.offsets + call.groups, id + call.first_row) - call.offsets;
    const uint16_t* bias = static_cast<const uint16_t*>(call.scales) + std::max<int64_t>(0, head - 1) * NGRAM_WIDTH;
    for (int i = 0; i < NGRAM_WIDTH; i++) values[i] = half_to_float(float_to_half(values[i] + half_to_float(bias[i])));
    store(call, row, 0, values, NGRAM_WIDTH);
}

}  // namespace

void gather_rows(const exl3_row_call& call) {
    const auto gather = call.kind == INT8_ROWS    ? int8_row
                        : call.kind == INT4_ROWS  ? int4_row
                        : call.kind == CODED_ROWS ? coded_row
                                                  : ngram_row;
    parallel_for((call.count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, call.threads, [&](int64_t unit, int) {
        const int64_t last = std::min(call.count, (unit + 1) * ROWS_AT_ONCE);
        for (int64_t row = unit * ROWS_AT_ONCE; row < last; row++) gather(call, row, call.ids[row]);
    });
}

}  // namespace exl3

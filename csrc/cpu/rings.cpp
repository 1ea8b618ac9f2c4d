#include "rings.h"

#include <algorithm>

#include "decode.h"
#include "format.h"
#include "kernels.h"
#include "parallel.h"

namespace exl3 {
namespace {

constexpr int GROUP = 256;  // values of an embedding's ring, rotated together

// The unscaled Hadamard transform in natural order.
void rotate(float (&values)[GROUP]) {
    for (int stride = 1; stride < GROUP; stride *= 2) {
        for (int first = 0; first < GROUP; first += 2 * stride) {
            for (int i = first; i < first + stride; i++) {
                const float a = values[i], b = values[i + stride];
                values[i] = a + b;
                values[i + stride] = a - b;
            }
        }
    }
}

}  // namespace

void decode_ring(const uint16_t* ring, int width, int bits, float* values) {
    const uint16_t* table = codebook_table(MUL1);
    const float scale = half_to_float(ring[0]);
    const auto symbol = [&](int i) {
        const int at = i * bits, word = 1 + at / 16;
        const uint32_t pair = ring[word] | (at % 16 + bits > 16 ? uint32_t(ring[word + 1]) << 16 : 0);
        return pair >> (at % 16) & ((1u << bits) - 1);
    };
    // The state before the first position is made of the ring's last symbols.
    uint32_t state = 0;
    for (int i = 16 / bits; i > 0; i--) state = state << bits | symbol(width - i);
    if (16 % bits) state |= symbol(width - 16 / bits - 1) << (16 / bits * bits);
    for (int i = 0; i < width; i++) {
        state = (state << bits | symbol(i)) & 0xffff;
        values[i] = half_to_float(table[state]) * scale;
    }
}

void embed(const EmbeddingTable& table, const int64_t* ids, int64_t count, int64_t hidden, int dtype, void* out,
           int64_t stride, int threads) {
    const int64_t words = ring_words(GROUP, table.bits);
    parallel_for(count, threads, [&](int64_t row, int) {
        for (int group = 0; group < table.groups; group++) {
            float values[GROUP];
            decode_ring(table.rings + (ids[row] * table.groups + group) * words, GROUP, table.bits, values);
            rotate(values);
            const int64_t first = int64_t(group) * GROUP, last = std::min<int64_t>(first + GROUP, hidden);
            for (int64_t column = first; column < last; column++) {
                const float sign = half_to_float(table.signs[column]);
                const uint16_t half = float_to_half(values[column - first] * 0.0625f * sign);
                const int64_t at = row * stride + column;
                if (dtype == FLOAT16) {
                    static_cast<uint16_t*>(out)[at] = half;
                } else if (dtype == BFLOAT16) {
                    static_cast<uint16_t*>(out)[at] = float_to_bfloat(half_to_float(half));
                } else {
                    static_cast<float*>(out)[at] = half_to_float(half);
                }
            }
        }
    });
}

}  // namespace exl3

// The row codec of quantized embeddings and n-gram tables: one ring of symbols a row or group.
#pragma once

#include <cstdint>

namespace exl3 {

// A ring of `width` values: word 0 is the fp16 scale, then width·bits bits, least significant first.
constexpr int64_t ring_words(int width, int bits) { return 1 + int64_t(width) * bits / 16; }

// mul1 depends on the sum of its product's four bytes alone.
inline uint32_t mul1_sum(uint32_t state) {
    const uint32_t x = state * 0x83dcd12d, pairs = (x & 0xff00ff) + (x >> 8 & 0xff00ff);
    return (pairs + (pairs >> 16)) & 0x7ff;
}

// The value of every sum, float [1021]: 4 KiB that stay in the nearest cache, where a value a state takes 256.
const float* mul1_by_sum();

}  // namespace exl3

// The row codec of quantized embeddings and n-gram tables: one ring of symbols a row or group.
#pragma once

#include <cstdint>

namespace exl3 {

// A ring of `width` values: word 0 is the fp16 scale, then width·bits bits, least significant first.
constexpr int64_t ring_words(int width, int bits) { return 1 + int64_t(width) * bits / 16; }

// values[i] = mul1(state i) · scale.
void decode_ring(const uint16_t* ring, int width, int bits, float* values);

}  // namespace exl3

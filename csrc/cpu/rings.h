// The row codec of quantized embeddings and n-gram tables: one ring of symbols a row or group.
#pragma once

#include <cstdint>

namespace exl3 {

// A ring of `width` values: word 0 is the fp16 scale, then width·bits bits, least significant first.
constexpr int64_t ring_words(int width, int bits) { return 1 + int64_t(width) * bits / 16; }

// values[i] = mul1(state i) · scale.
void decode_ring(const uint16_t* ring, int width, int bits, float* values);

struct EmbeddingTable {
    const uint16_t* rings;  // [rows][groups][ring_words(256, bits)]
    const uint16_t* signs;  // fp16 [groups][256]
    int groups;
    int bits;
};

// out[i] = the row ids[i], rotated back, rounded to fp16 as the format has it and cut to `hidden`.
void embed(const EmbeddingTable& table, const int64_t* ids, int64_t count, int64_t hidden, int dtype, void* out,
           int64_t stride, int threads);

}  // namespace exl3

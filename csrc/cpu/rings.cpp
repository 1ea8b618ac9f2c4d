#include "rings.h"

#include <array>

#include "decode.h"
#include "float16.h"
#include "format.h"

namespace exl3 {
namespace {

constexpr uint32_t MUL1_FACTOR = 0x83dcd12d;

uint32_t byte_sum(uint32_t state) {
    const uint32_t x = state * MUL1_FACTOR, pairs = (x & 0xff00ff) + (x >> 8 & 0xff00ff);
    return (pairs + (pairs >> 16)) & 0x7ff;
}

// mul1 depends on the sum of four bytes alone: 4 KiB that stay in the nearest cache, where a value a state takes 256.
const float* values_by_sum() {
    static const std::array<float, 1021> values = [] {
        std::array<float, 1021> found{};
        const uint16_t* weights = codebook_table(MUL1);
        for (uint32_t state = 0; state < 65536; state++) found[byte_sum(state)] = half_to_float(weights[state]);
        return found;
    }();
    return values.data();
}

}  // namespace

void decode_ring(const uint16_t* ring, int width, int bits, float* values) {
    const float* by_sum = values_by_sum();
    const float scale = half_to_float(ring[0]);
    const uint32_t mask = (1u << bits) - 1;
    // The state before the first position is made of the ring's last symbols, which lie in its last 16 bits.
    const int back = (16 + bits - 1) / bits - 1;
    uint32_t state = 0, tail = uint32_t(ring[ring_words(width, bits) - 1]) >> (16 - back * bits);
    for (int i = 0; i < back; i++, tail >>= bits) state = state << bits | (tail & mask);
    const uint16_t* next = ring + 1;
    uint32_t buffer = 0;
    int held = 0;
    for (int i = 0; i < width; i++) {
        if (held < bits) {
            buffer |= uint32_t(*next++) << held;
            held += 16;
        }
        state = (state << bits | (buffer & mask)) & 0xffff;
        buffer >>= bits;
        held -= bits;
        values[i] = by_sum[byte_sum(state)] * scale;
    }
}

}  // namespace exl3

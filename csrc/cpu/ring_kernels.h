// Rings of the row codec to values, in loops that become vector code for each instruction set.
#pragma once

#include <cstring>

#include "rings.h"

namespace {

using namespace exl3;

constexpr int STATE_BITS = 16;
constexpr int RING_MOST = 256;  // values of the widest ring

// Every state reaches back to symbols before its own, at the ring's start to those at its end.
struct RingStates {
    uint32_t padded[2][STATE_BITS + RING_MOST];

    // Eight symbols take BITS whole bytes. Reads up to eight bytes beyond the last.
    template <int WIDTH, int BITS>
    void symbols(const uint8_t* code) {
        uint32_t* own = padded[0] + STATE_BITS;
        for (int group = 0; group < WIDTH / 8; group++) {
            uint64_t bits;
            std::memcpy(&bits, code + group * BITS, sizeof bits);
            for (int i = 0; i < 8; i++) own[8 * group + i] = uint32_t(bits >> (i * BITS)) & ((1u << BITS) - 1);
        }
        std::memcpy(padded[0], own + WIDTH - STATE_BITS, STATE_BITS * sizeof(uint32_t));
    }

    // state i = symbol i | symbol i-1 << BITS | …: in doubling steps.
    template <int WIDTH, int BITS>
    const uint32_t* states() {
        int from = 0;
        for (int step = 1; step * BITS < STATE_BITS; step *= 2, from ^= 1) {
            const uint32_t* a = padded[from];
            uint32_t* b = padded[from ^ 1];
            for (int i = 0; i < step; i++) b[i] = a[i];
            for (int i = step; i < STATE_BITS + WIDTH; i++) b[i] = a[i] | a[i - step] << (step * BITS);
        }
        return padded[from] + STATE_BITS;
    }
};

template <int WIDTH, int BITS>
void decode_ring_of(const uint16_t* ring, float* values) {
    constexpr int bytes = WIDTH * BITS / 8;
    uint8_t code[bytes + 8];
    std::memcpy(code, ring + 1, bytes);
    std::memset(code + bytes, 0, 8);
    RingStates rings;
    rings.symbols<WIDTH, BITS>(code);
    const uint32_t* states = rings.states<WIDTH, BITS>();
    const float* by_sum = mul1_by_sum();
    const float scale = half_to_float(ring[0]);
    uint32_t sums[WIDTH];
    for (int i = 0; i < WIDTH; i++) sums[i] = mul1_sum(states[i] & 0xffff);
    for (int i = 0; i < WIDTH; i++) values[i] = by_sum[sums[i]] * scale;
}

template <int WIDTH>
void decode_ring(const uint16_t* ring, int bits, float* values) {
    static constexpr void (*decoders[])(const uint16_t*, float*) = {
        decode_ring_of<WIDTH, 1>, decode_ring_of<WIDTH, 2>, decode_ring_of<WIDTH, 3>, decode_ring_of<WIDTH, 4>,
        decode_ring_of<WIDTH, 5>, decode_ring_of<WIDTH, 6>, decode_ring_of<WIDTH, 7>, decode_ring_of<WIDTH, 8>,
    };
    decoders[bits - 1](ring, values);
}

}  // namespace

// The EXL3 tile as numbers: where each position's 16-bit window lies in the ring of bits, which row
// and column it holds, and the constants of the three codebooks.
//
// A tile is 16 x 16 weights in 256 positions. Its ring is the tile's little-endian dwords read most
// significant bit first; position t owns the 16 ring bits that end at `window_end(half_bits, t)`.
#pragma once

#include <cstdint>

#include "float16.h"

namespace {

constexpr int TILE = 16;           // rows and columns of a tile
constexpr int TILE_WEIGHTS = 256;  // positions of a tile
constexpr int BLOCK = 128;         // channels that one Hadamard transform mixes

enum Codebook : int { INST3 = 0, MCG = 1, MUL1 = 2 };

constexpr uint32_t MUL1_MULTIPLIER = 0x83DCD12Du;
constexpr uint32_t MCG_MULTIPLIER = 0xCBAC1FEDu;
constexpr uint32_t INST3_MULTIPLIER = 89226354u;
constexpr uint32_t INST3_ADDEND = 64248484u;
constexpr uint32_t HALVES_MASK = 0x8FFF8FFFu;
constexpr uint32_t HALVES_XOR = 0x3B603B60u;

constexpr float MUL1_SCALE = 0.00676727294921875f;  // fp16 0x1EEE
constexpr float MUL1_BIAS = -10.3828125f;           // fp16 0xC931, applied to 1024 + byte sum

// Dwords of one tile; 2·K dwords hold 64 positions, for half-integer K too.
constexpr int tile_dwords(int half_bits) { return 4 * half_bits; }

// Ring bit one past the window of position t (modulo the ring's 128·half_bits bits).
constexpr int window_end(int half_bits, int t) { return half_bits * (t + 1) / 2; }

// New bits that position t brings.
constexpr int window_step(int half_bits, int t) { return window_end(half_bits, t) - window_end(half_bits, t - 1); }

// Positions come in 32 lanes of eight: lane l = t / 8, j = t % 8.
constexpr int position_row(int t) { return 2 * (t >> 3 & 3) + (t & 1) + 8 * (t >> 1 & 1); }
constexpr int position_column(int t) { return (t >> 5) + 8 * (t >> 2 & 1); }

inline uint32_t window(const uint32_t* tile, int half_bits, int t) {
    const int ring = 32 * tile_dwords(half_bits);
    const int end = window_end(half_bits, t);
    const int last = (end - 1) >> 5;
    const uint32_t high = tile[last ? last - 1 : (ring >> 5) - 1];
    const uint64_t pair = uint64_t(high) << 32 | tile[last];
    return uint32_t(pair >> (32 * (last + 1) - end)) & 0xffff;
}

// The fp16 weight of a state, bit exact.
inline uint16_t decode_state(int codebook, uint32_t state) {
    if (codebook == MUL1) {
        const uint32_t x = state * MUL1_MULTIPLIER;
        const uint32_t sum = (x & 255) + (x >> 8 & 255) + (x >> 16 & 255) + (x >> 24);
        // The product has at most 21 significant bits, so the double sum is exact and rounds once.
        return float_to_half(float(double(1024 + sum) * double(MUL1_SCALE) + double(MUL1_BIAS)));
    }
    uint32_t x = codebook == MCG ? state * MCG_MULTIPLIER : state * INST3_MULTIPLIER + INST3_ADDEND;
    x = (x & HALVES_MASK) ^ HALVES_XOR;
    return float_to_half(half_to_float(uint16_t(x)) + half_to_float(uint16_t(x >> 16)));
}

inline bool known_rate(int64_t half_bits, int64_t codebook) {
    if (codebook < INST3 || codebook > MUL1) return false;
    if (half_bits % 2) return codebook == MUL1 && half_bits >= 3 && half_bits <= 7;
    return half_bits >= 2 && half_bits <= 16;
}

}  // namespace

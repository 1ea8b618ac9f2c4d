// The dwords of a group of eight lanes and the one before them, where they lie in a tile, for AVX-512.
#pragma once

#include "simd_avx512.h"
#include "tiles_in_place.h"

namespace {

// Byte of the ring (big-endian dwords) as a byte of memory relative to the same dword.
constexpr int memory_byte(int ring_byte) { return ring_byte / 4 * 4 + 3 - ring_byte % 4; }

// K up to 7, so that a vector holds them.
struct GroupBytes {
    using Tiles = TilesInPlace;
    int half_bits;
    __mmask16 dwords;  // keeps the load inside the tile, which may be the last of its memory

    explicit GroupBytes(int half_bits) : half_bits(half_bits), dwords(__mmask16((2 << half_bits) - 1)) {}

    I load(const uint32_t* tile, int group) const {
        const uint32_t* before = tile + group * half_bits - 1;
        if (group) return _mm512_maskz_loadu_epi32(dwords, before);
        const I bytes = _mm512_maskz_loadu_epi32(dwords & ~1, before);
        return _mm512_mask_set1_epi32(bytes, 1, int(tile[tile_dwords(half_bits) - 1]));
    }

    // Index of a ring byte, counted from the group's first, in the loaded vector.
    static uint8_t index(int ring_byte) { return uint8_t(memory_byte(ring_byte + 4)); }
};

// The dword before a group of K = 8, whose own bytes fill a vector.
inline int dword_before(const uint32_t* tile, int group) {
    return int(group ? tile[group * 16 - 1] : tile[tile_dwords(16) - 1]);
}

// Position, in lane I of its group, of word M of that lane's qword, for the pairs J, J + 1 and J + 4, J + 5.
constexpr int position_of_word(int lane, int word, int j) { return 8 * lane + j + word % 2 + 4 * (word / 2); }

}  // namespace

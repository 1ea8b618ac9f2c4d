// Window extraction with AVX-512 VBMI: one byte permute brings the ring bits of a lane into a qword,
// in order, and `vpmultishiftqb` then cuts two 16-bit windows out of each qword at once.
#pragma once

#include "simd_avx512.h"

namespace {

// Byte of the ring (big-endian dwords) as a byte of memory relative to the same dword.
constexpr int memory_byte(int ring_byte) { return ring_byte / 4 * 4 + 3 - ring_byte % 4; }

// Shifts of windows j and j + 4 of the eight lanes, for qwords that end at ring byte `last(lane)`.
template <class LastByte>
inline I window_shifts(int half_bits, int j, LastByte last) {
    alignas(64) uint8_t shift[64];
    for (int i = 0; i < 16; i++) {
        const int lane = i / 2, end = window_end(half_bits, 8 * lane + j + 4 * (i % 2));
        const int low = 8 * last(lane) - end;
        for (int byte = 0; byte < 4; byte++) shift[4 * i + byte] = uint8_t(low + 8 * byte);
    }
    return load(shift);
}

constexpr __mmask64 WINDOW_BYTES = 0x3333333333333333;

// K up to 6: the eight windows of a lane lie within 64 bits.
struct NarrowWindows {
    I order, shifts[4];
    int half_bits;
    __mmask16 dwords;

    explicit NarrowWindows(int half_bits) : half_bits(half_bits), dwords(__mmask16((2 << half_bits) - 1)) {
        const auto last = [half_bits](int lane) { return (4 * half_bits * (lane + 1) + 7) / 8; };
        alignas(64) uint8_t from[64];
        for (int i = 0; i < 64; i++) {
            // The vector starts one dword before the group.
            const int byte = last(i / 8) - 1 - i % 8 + 4;
            from[i] = uint8_t(byte < 0 ? 0 : memory_byte(byte));
        }
        order = ::load(from);
        for (int j = 0; j < 4; j++) shifts[j] = window_shifts(half_bits, j, last);
    }

    I load(const uint32_t* tile, int group) const {
        const uint32_t* before = tile + group * half_bits - 1;
        I bytes;
        if (group == 0) {
            bytes = _mm512_maskz_loadu_epi32(dwords & ~1, before);
            bytes = _mm512_mask_set1_epi32(bytes, 1, int(tile[tile_dwords(half_bits) - 1]));
        } else {
            bytes = _mm512_maskz_loadu_epi32(dwords, before);
        }
        return _mm512_permutexvar_epi8(order, bytes);
    }

    template <int J>
    I get(I bits) const {
        return _mm512_maskz_multishift_epi64_epi8(WINDOW_BYTES, shifts[J], bits);
    }
};

// K = 7 and 8: windows 0, 1, 4 and 5 of a lane come from one qword, 2, 3, 6 and 7 from another.
struct WideWindows {
    struct Bits {
        I part[2];
    };
    I order[2], shifts[4];
    int half_bits;
    __mmask16 dwords;

    explicit WideWindows(int half_bits) : half_bits(half_bits), dwords(__mmask16((1 << half_bits) - 1)) {
        for (int part = 0; part < 2; part++) {
            const auto last = [=](int lane) { return (window_end(half_bits, 8 * lane + 5 + 2 * part) + 7) / 8; };
            alignas(64) uint8_t from[64];
            for (int i = 0; i < 64; i++) {
                const int byte = last(i / 8) - 1 - i % 8;
                // Index 64 and up reads the other operand, which repeats the dword before the group.
                from[i] = uint8_t(byte < 0 ? 64 + memory_byte(byte + 4) % 4 : memory_byte(byte));
            }
            order[part] = ::load(from);
            for (int j = 2 * part; j < 2 * part + 2; j++) shifts[j] = window_shifts(half_bits, j, last);
        }
    }

    Bits load(const uint32_t* tile, int group) const {
        const uint32_t* first = tile + group * half_bits;
        const I bytes = _mm512_maskz_loadu_epi32(dwords, first);
        const I before = splat(int(group ? first[-1] : tile[tile_dwords(half_bits) - 1]));
        return {{_mm512_permutex2var_epi8(bytes, order[0], before), _mm512_permutex2var_epi8(bytes, order[1], before)}};
    }

    template <int J>
    I get(const Bits& bits) const {
        return _mm512_maskz_multishift_epi64_epi8(WINDOW_BYTES, shifts[J], bits.part[J / 2]);
    }
};

}  // namespace

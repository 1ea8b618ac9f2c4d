// Window extraction with AVX-512 VBMI: byte permutes bring ring bits in order, shifts align them.
//
// The multiplications of the codebook and of the sums share two of Zen 4's four vector pipes, so
// windows are cut with what runs on the others: permutes, shifts and logic. (One `vpmultishiftqb`
// would cut 16 windows, but on the multipliers' pipes: a third slower in all.)
#pragma once

#include "group_bytes.h"
#include "repeat.h"

namespace {

// Any K but 8: the three bytes around each window, then a shift.
struct AnyWindows : GroupBytes {
    I order[4], shifts[4];

    explicit AnyWindows(int half_bits) : GroupBytes(half_bits) {
        for (int j = 0; j < 4; j++) {
            alignas(64) uint8_t from[64];
            int32_t shift[16];
            for (int i = 0; i < 16; i++) {
                const int end = window_end(half_bits, i / 2 * 8 + j + 4 * (i % 2));
                const int last = (end + 7) / 8;
                for (int byte = 0; byte < 4; byte++) from[4 * i + byte] = index(last - 1 - (byte < 3 ? byte : 2));
                shift[i] = 8 * last - end;
            }
            order[j] = ::load(from);
            shifts[j] = ::load(shift);
        }
    }

    template <int J>
    I get(I bytes) const {
        const I aligned = _mm512_srlv_epi32(_mm512_permutexvar_epi8(order[J], bytes), shifts[J]);
        return _mm512_and_si512(aligned, splat(0xffff));
    }
};

// K = 2, 4 and 6: the windows of a lane lie in one qword, and j and j + 4 are whole bytes apart.
template <int HALF_BITS>
struct EvenWindows : GroupBytes {
    static_assert(HALF_BITS % 4 == 0 && HALF_BITS <= 12, "needs an even K up to 6");

    I order, places[4];

    explicit EvenWindows(int half_bits) : GroupBytes(half_bits) {
        alignas(64) uint8_t from[64], place[64];
        for (int i = 0; i < 64; i++) {
            const int byte = HALF_BITS / 2 * (i / 8 + 1) - 1 - i % 8;
            from[i] = index(byte < -4 ? -4 : byte);
        }
        order = ::load(from);
        for (int j = 0; j < 4; j++) {
            for (int i = 0; i < 16; i++) {
                const int low = (low_bit(j) + (i % 2 ? 0 : 2 * HALF_BITS)) / 8;
                const int lane = i / 2 % 2 * 8;  // vpshufb stays within 16 bytes
                for (int byte = 0; byte < 4; byte++) place[4 * i + byte] = uint8_t(byte < 2 ? lane + low + byte : 0x80);
            }
            places[j] = ::load(place);
        }
    }

    // Where window j + 4 begins in its lane's qword.
    static constexpr int low_bit(int j) { return HALF_BITS / 2 * (3 - j); }

    I load(const uint32_t* tile, int group) const {
        return _mm512_permutexvar_epi8(order, GroupBytes::load(tile, group));
    }

    template <int J>
    I get(I bits) const {
        constexpr int shift = low_bit(J) % 8;
        return _mm512_shuffle_epi8(shift ? _mm512_srli_epi64(bits, shift) : bits, places[J]);
    }
};

// K = 8: every window is two whole bytes.
struct ByteWindows {
    using Tiles = TilesInPlace;
    struct Bits {
        I bytes, before;
    };
    I order[4];

    explicit ByteWindows(int) {
        for (int j = 0; j < 4; j++) {
            alignas(64) uint8_t from[64];
            for (int i = 0; i < 16; i++) {
                const int last = i / 2 * 8 + j + 4 * (i % 2);
                from[4 * i] = uint8_t(memory_byte(last));
                // Index 64 and up reads the other operand, which repeats the dword before the group.
                from[4 * i + 1] = uint8_t(last ? memory_byte(last - 1) : 64);
                from[4 * i + 2] = from[4 * i + 3] = 0;
            }
            order[j] = ::load(from);
        }
    }

    Bits load(const uint32_t* tile, int group) const {
        const uint32_t* first = tile + group * 16;
        return {::load(first), splat(dword_before(tile, group))};
    }

    template <int J>
    I get(const Bits& bits) const {
        constexpr __mmask64 used = 0x3333333333333333;
        if constexpr (J) return _mm512_maskz_permutexvar_epi8(used, order[J], bits.bytes);
        return _mm512_maskz_permutex2var_epi8(used, bits.bytes, order[J], bits.before);
    }
};

template <class Function>
void with_windows(int half_bits, Function&& function) {
    switch (half_bits) {
        case 4: return function(Kind<EvenWindows<4>>{});
        case 8: return function(Kind<EvenWindows<8>>{});
        case 12: return function(Kind<EvenWindows<12>>{});
        case 16: return function(Kind<ByteWindows>{});
        default: return function(Kind<AnyWindows>{});
    }
}

}  // namespace

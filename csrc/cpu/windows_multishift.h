// Window extraction with AVX-512 VBMI, as words: a byte permute brings the ring bits of four windows into a qword,
// `vpmultishiftqb` cuts them.
//
// For processors that multiply words and shift on other ports, as Intel's do; where `vpmultishiftqb` takes a multiplier's
// time, as on Zen 4, windows_vbmi.h is faster.
#pragma once

#include "group_bytes.h"
#include "repeat.h"

namespace {

// K up to 7: from the first bit of a qword's first window to the last of its last lie at most 16 + 5·K bits.
struct AnyWindows : GroupBytes {
    I order[2], shifts[2];

    explicit AnyWindows(int half_bits) : GroupBytes(half_bits) {
        for (int pair = 0; pair < 2; pair++) {
            uint8_t from[64], shift[64];
            for (int lane = 0; lane < 8; lane++) {
                const int last = (window_end(half_bits, position_of_word(lane, 3, 2 * pair)) + 7) / 8;
                for (int i = 0; i < 8; i++) {
                    const int byte = last - 1 - i;
                    from[8 * lane + i] = index(byte < -4 ? -4 : byte);
                    const int end = window_end(half_bits, position_of_word(lane, i / 2, 2 * pair));
                    shift[8 * lane + i] = uint8_t(8 * last - end + i % 2 * 8);
                }
            }
            order[pair] = ::load(from);
            shifts[pair] = ::load(shift);
        }
    }

    // Windows j and j + 1, and j + 4 and j + 5, of each lane, as words.
    template <int J>
    I pair(I bytes) const {
        return _mm512_multishift_epi64_epi8(shifts[J / 2], _mm512_permutexvar_epi8(order[J / 2], bytes));
    }
};

// K = 8: every window is two whole bytes.
struct ByteWindows {
    using Tiles = TilesInPlace;
    struct Bits {
        I bytes;
        int before;
    };
    I order[2];

    explicit ByteWindows(int) {
        for (int pair = 0; pair < 2; pair++) {
            uint8_t from[64];
            for (int i = 0; i < 32; i++) {
                const int t = position_of_word(i / 4, i % 4, 2 * pair);
                from[2 * i] = uint8_t(memory_byte(t));
                from[2 * i + 1] = uint8_t(t ? memory_byte(t - 1) : 0);
            }
            order[pair] = ::load(from);
        }
    }

    Bits load(const uint32_t* tile, int group) const { return {::load(tile + group * 16), dword_before(tile, group)}; }

    template <int J>
    I pair(const Bits& bits) const {
        const I words = _mm512_permutexvar_epi8(order[J / 2], bits.bytes);
        if constexpr (J) return words;
        // The first window's upper byte is the last before the group: the lowest of that dword.
        return _mm512_mask_blend_epi8(2, words, splat(int32_t(uint32_t(bits.before) << 8)));
    }
};

template <class Function>
void with_windows(int half_bits, Function&& function) {
    half_bits == 16 ? function(Kind<ByteWindows>{}) : function(Kind<AnyWindows>{});
}

}  // namespace

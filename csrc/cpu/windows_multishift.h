// Window extraction with AVX-512 VBMI, as words: a byte permute brings the ring bits of four windows into a qword,
// `vpmultishiftqb` cuts them.
//
// For processors that multiply words and shift on other ports, as Intel's do; where `vpmultishiftqb` takes a multiplier's
// time, as on Zen 4, windows_vbmi.h is faster.
#pragma once

#include "group_bytes.h"
#include "repeat.h"

namespace {

// From the first bit of some windows of a lane to the last they are within 64 bits: for K up to 6 all eight of the lane, so
// that one permute serves both pairs of positions, for K = 7 those of each pair.
template <bool WHOLE_LANES>
struct QwordWindows : GroupBytes {
    I order[2], shifts[2];

    explicit QwordWindows(int half_bits) : GroupBytes(half_bits) {
        for (int pair = 0; pair < 2; pair++) {
            uint8_t from[64], shift[64];
            for (int lane = 0; lane < 8; lane++) {
                const int last_pair = WHOLE_LANES ? 2 : 2 * pair;
                const int last = (window_end(half_bits, position_of_word(lane, 3, last_pair)) + 7) / 8;
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

    I load(const uint32_t* tile, int group) const {
        const I bytes = GroupBytes::load(tile, group);
        return WHOLE_LANES ? _mm512_permutexvar_epi8(order[0], bytes) : bytes;
    }

    // Windows j and j + 1, and j + 4 and j + 5, of each lane, as words.
    template <int J>
    I pair(I bytes) const {
        const I qwords = WHOLE_LANES ? bytes : _mm512_permutexvar_epi8(order[J / 2], bytes);
        return _mm512_multishift_epi64_epi8(shifts[J / 2], qwords);
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
    half_bits == 16   ? function(Kind<ByteWindows>{})
    : half_bits == 14 ? function(Kind<QwordWindows<false>>{})
                      : function(Kind<QwordWindows<true>>{});
}

}  // namespace

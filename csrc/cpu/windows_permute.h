// Window extraction for AVX-512 without VBMI, as words: a permute of words brings the ring bits of two lanes into each 16
// bytes, a shuffle those of two neighbouring windows into a dword; two shifts and a blend make two words of it.
#pragma once

#include "group_bytes.h"
#include "repeat.h"

namespace {

// K up to 7. Half-integer rates leave the second lanes of a pair at an odd byte, which the shuffle knows.
struct AnyWindows : GroupBytes {
    I words, order[2], right[2], left[2];

    explicit AnyWindows(int half_bits) : GroupBytes(half_bits) {
        int16_t word[32];
        int start[4];  // of two lanes' ring bytes within 16: the first window begins at most two bytes before
        for (int part = 0; part < 4; part++) {
            const int first = (half_bits * part - 2) / 2;
            start[part] = half_bits * part - 2 * first;
            for (int i = 0; i < 8; i++) {
                const int ring_word = first + i < 2 * half_bits ? first + i : first;
                word[8 * part + i] = int16_t(index(2 * ring_word + 1) / 2);
            }
        }
        words = ::load(word);
        for (int pair = 0; pair < 2; pair++) {
            int8_t from[64];
            int32_t low[16], high[16];
            for (int i = 0; i < 16; i++) {
                const int t = position_of_word(i / 2 % 2, 2 * (i % 2), 2 * pair);
                const int first_end = window_end(half_bits, t), end = window_end(half_bits, t + 1);
                const int last = (end + 7) / 8;
                for (int byte = 0; byte < 4; byte++) {
                    const int at = start[i / 4] + last - 1 - byte;
                    from[4 * i + byte] = int8_t(at < 0 ? -1 : at ^ 1);  // no bit of that byte is used
                }
                low[i] = 8 * last - first_end;
                high[i] = 16 - (8 * last - end);
            }
            order[pair] = ::load(from);
            right[pair] = ::load(low);
            left[pair] = ::load(high);
        }
    }

    I load(const uint32_t* tile, int group) const {
        return _mm512_permutexvar_epi16(words, GroupBytes::load(tile, group));
    }

    // Windows j and j + 1, and j + 4 and j + 5, of each lane, as words.
    template <int J>
    I pair(I bytes) const {
        const I both = _mm512_shuffle_epi8(bytes, order[J / 2]);
        const I low = _mm512_srlv_epi32(both, right[J / 2]), high = _mm512_sllv_epi32(both, left[J / 2]);
        return _mm512_mask_blend_epi16(0xaaaaaaaa, low, high);
    }
};

// K = 8: every window is two whole bytes, and only the first of a dword takes one of the dword before.
struct ByteWindows {
    using Tiles = TilesInPlace;
    struct Bits {
        I here, before;
    };
    I order[2], from_before;

    explicit ByteWindows(int) {
        for (int pair = 0; pair < 2; pair++) {
            int8_t from[64], earlier[64];
            for (int i = 0; i < 32; i++) {
                const int t = position_of_word(i / 4 % 2, i % 4, 2 * pair);
                from[2 * i] = int8_t(memory_byte(t));
                from[2 * i + 1] = int8_t(t ? memory_byte(t - 1) : 0);
                earlier[2 * i] = -1;
                earlier[2 * i + 1] = int8_t(t / 4 * 4);
            }
            order[pair] = ::load(from);
            if (!pair) from_before = ::load(earlier);
        }
    }

    Bits load(const uint32_t* tile, int group) const {
        const uint32_t* first = tile + group * 16;
        if (group) return {::load(first), ::load(first - 1)};
        const I shifted = _mm512_maskz_loadu_epi32(__mmask16(~1), first - 1);
        return {::load(first), _mm512_mask_set1_epi32(shifted, 1, dword_before(tile, group))};
    }

    template <int J>
    I pair(const Bits& bits) const {
        const I words = _mm512_shuffle_epi8(bits.here, order[J / 2]);
        if constexpr (J) return words;
        // The upper bytes of positions 0 and 4 of each lane.
        return _mm512_mask_shuffle_epi8(words, 0x2222222222222222, bits.before, from_before);
    }
};

template <class Function>
void with_windows(int half_bits, Function&& function) {
    half_bits == 16 ? function(Kind<ByteWindows>{}) : function(Kind<AnyWindows>{});
}

}  // namespace

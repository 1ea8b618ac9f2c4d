// Window extraction with dword permutes, for AVX-512 without VBMI: each lane fetches the dword its
// window ends in and the one before, and shifts the two together.
#pragma once

#include "repeat.h"
#include "simd_avx512.h"
#include "tiles_in_place.h"

namespace {

struct Windows {
    using Tiles = TilesInPlace;
    struct Bits {
        I here, before;
    };
    I from[4], right[4], left[4];
    int half_bits;
    __mmask16 dwords;

    explicit Windows(int half_bits) : half_bits(half_bits), dwords(__mmask16((1 << half_bits) - 1)) {
        for (int j = 0; j < 4; j++) {
            int32_t dword[16], shift[16], rest[16];
            for (int i = 0; i < 16; i++) {
                const int end = window_end(half_bits, i / 2 * 8 + j + 4 * (i % 2));
                dword[i] = (end - 1) / 32;
                shift[i] = 32 * (dword[i] + 1) - end;
                rest[i] = 32 - shift[i];
            }
            from[j] = ::load(dword);
            right[j] = ::load(shift);
            left[j] = ::load(rest);
        }
    }

    Bits load(const uint32_t* tile, int group) const {
        const uint32_t* first = tile + group * half_bits;
        const I here = _mm512_maskz_loadu_epi32(dwords, first);
        if (group) return {here, _mm512_maskz_loadu_epi32(dwords, first - 1)};
        const I shifted = _mm512_maskz_loadu_epi32(dwords & ~1, first - 1);
        return {here, _mm512_mask_set1_epi32(shifted, 1, int(tile[tile_dwords(half_bits) - 1]))};
    }

    template <int J>
    I get(const Bits& bits) const {
        const I low = _mm512_srlv_epi32(_mm512_permutexvar_epi32(from[J], bits.here), right[J]);
        const I high = _mm512_sllv_epi32(_mm512_permutexvar_epi32(from[J], bits.before), left[J]);
        return _mm512_ternarylogic_epi32(low, high, splat(0xffff), 0xa8);  // (low | high) & 0xffff
    }
};
template <class Function>
void with_windows(int, Function&& function) {
    function(Kind<Windows>{});
}

}  // namespace

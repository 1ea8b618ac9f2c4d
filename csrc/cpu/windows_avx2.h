// Window extraction for AVX2: two dword permutes and two shifts.
#pragma once

#include "repeat.h"
#include "simd_avx2.h"

namespace {

// Each lane fetches the dword its window ends in and the one before, and shifts the two together.
struct Windows {
    struct Bits {
        I here, before;
        int odd;
    };
    I from[2][4], right[2][4], left[2][4];
    I kept, kept_before;
    int half_bits;

    explicit Windows(int half_bits) : half_bits(half_bits) {
        // Four lanes take 16·half_bits bits, so groups of an odd rate start in mid-dword every other time.
        for (int odd = 0; odd < 2; odd++) {
            for (int j = 0; j < 4; j++) {
                int32_t dword[8], shift[8], rest[8];
                for (int i = 0; i < 8; i++) {
                    const int end = window_end(half_bits, i / 2 * 8 + j + 4 * (i % 2)) + 16 * odd;
                    dword[i] = (end - 1) / 32;
                    shift[i] = 32 * (dword[i] + 1) - end;
                    rest[i] = 32 - shift[i];
                }
                from[odd][j] = ::load(dword);
                right[odd][j] = ::load(shift);
                left[odd][j] = ::load(rest);
            }
        }
        // Masks keep the loads inside the tile, which may be the last of its memory.
        int32_t mask[8];
        for (int i = 0; i < 8; i++) mask[i] = i < (half_bits + 1) / 2 ? -1 : 0;
        kept = ::load(mask);
        mask[0] = 0;
        kept_before = ::load(mask);
    }

    Bits load(const uint32_t* tile, int group) const {
        const int first = group * half_bits / 2;
        const int* dwords = reinterpret_cast<const int*>(tile) + first;
        const I here = _mm256_maskload_epi32(dwords, kept);
        const int before = dwords[first ? -1 : tile_dwords(half_bits) - 1];
        const I shifted = _mm256_maskload_epi32(dwords - 1, kept_before);
        return {here, _mm256_blend_epi32(shifted, splat(before), 1), group * half_bits % 2};
    }

    template <int J>
    I get(const Bits& b) const {
        const I order = from[b.odd][J];
        const I low = _mm256_srlv_epi32(_mm256_permutevar8x32_epi32(b.here, order), right[b.odd][J]);
        const I high = _mm256_sllv_epi32(_mm256_permutevar8x32_epi32(b.before, order), left[b.odd][J]);
        return _mm256_and_si256(_mm256_or_si256(low, high), splat(0xffff));
    }
};
template <class Function>
void with_windows(int, Function&& function) {
    function(Kind<Windows>{});
}

}  // namespace

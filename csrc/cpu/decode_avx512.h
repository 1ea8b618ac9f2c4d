// Codebooks under AVX-512 with VNNI, where dwords are multiplied as fast as words (Zen 4): states to int16 weights, two
// vectors of states to one vector of pairs.
#pragma once

#include "simd_avx512.h"

namespace {

// Each lane's two int16 halves of a and of b summed: a's sum in the low half, b's in the high.
inline I add_halves(I a, I b) {
    // One permute rather than VBMI2's funnel shift, which would wait for the multipliers' pipes.
    alignas(64) static constexpr uint16_t order[32] = {1,  32, 3,  34, 5,  36, 7,  38, 9,  40, 11, 42, 13, 44, 15, 46,
                                                       17, 48, 19, 50, 21, 52, 23, 54, 25, 56, 27, 58, 29, 60, 31, 62};
    const I straight = _mm512_mask_blend_epi16(0xaaaaaaaa, a, b);
    return _mm512_add_epi16(straight, _mm512_permutex2var_epi16(a, load(order), b));
}

template <int CODEBOOK>
struct Decoder {
    static_assert(CODEBOOK == INST3 || CODEBOOK == MCG, "mul1 has its own form");

    // ±2^e by sign (bit 5) and exponent (bits 0 and 1, as stored) of a half; bits 2 to 4 are noise.
    I factors[2];

    Decoder() {
        int16_t table[64];
        for (int i = 0; i < 64; i++) table[i] = int16_t((i & 32 ? -1 : 1) * (1 << ((i & 3) ^ 2)));
        factors[0] = load(table);
        factors[1] = load(table + 32);
    }

    static I hash(I state) {
        if (CODEBOOK == MCG) return _mm512_mullo_epi32(state, splat(int(MCG_MULTIPLIER)));
        return add(_mm512_mullo_epi32(state, splat(int(INST3_MULTIPLIER))), splat(int(INST3_ADDEND)));
    }

    // Both fp16 halves as integers in units of 2^-13: mantissa with its leading one, times ±2^e.
    I fixed(I x) const {
        const I mantissa = _mm512_ternarylogic_epi32(x, splat(0x03ff03ff), splat(0x07600760), 0x6a);  // (x & b) ^ c
        const I factor = _mm512_permutex2var_epi16(factors[0], _mm512_srli_epi16(x, 10), factors[1]);
        return _mm512_mullo_epi16(mantissa, factor);
    }

    I pair(I first, I second) const {
        const I sum = add_halves(fixed(hash(first)), fixed(hash(second)));
        return _mm512_mulhrs_epi16(sum, splat(0x40004000));  // halved, rounding up
    }

    template <int J, class Windows, class Bits>
    I pair(const Windows& windows, const Bits& bits) const {
        return pair(windows.template get<J>(bits), windows.template get<J + 1>(bits));
    }
};

template <>
struct Decoder<MUL1> {
    static I hash(I state) { return _mm512_mullo_epi32(state, splat(int(MUL1_MULTIPLIER))); }

    I pair(I first, I second) const {
        const I ones = splat(0x01010101);
        const I high = _mm512_slli_epi32(_mm512_dpbusd_epi32(splat(0), hash(second), ones), 16);
        return _mm512_dpbusd_epi32(high, hash(first), ones);
    }

    template <int J, class Windows, class Bits>
    I pair(const Windows& windows, const Bits& bits) const {
        return pair(windows.template get<J>(bits), windows.template get<J + 1>(bits));
    }
};

}  // namespace

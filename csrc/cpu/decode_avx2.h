// Codebooks under AVX2: states to int16 weights, two vectors of states to one vector of pairs.
#pragma once

#include "simd_avx2.h"

namespace {

// Each lane's two int16 halves of a and of b summed: a's sum in the low half, b's in the high.
inline I add_halves(I a, I b) {
    const I straight = _mm256_blend_epi16(a, b, 0xaa);
    const I crossed = _mm256_or_si256(_mm256_srli_epi32(a, 16), _mm256_slli_epi32(b, 16));
    return _mm256_add_epi16(straight, crossed);
}

template <int CODEBOOK>
struct Decoder {
    static_assert(CODEBOOK == INST3 || CODEBOOK == MCG, "mul1 has its own form");

    static I hash(I state) {
        if (CODEBOOK == MCG) return _mm256_mullo_epi32(state, splat(int(MCG_MULTIPLIER)));
        return add(_mm256_mullo_epi32(state, splat(int(INST3_MULTIPLIER))), splat(int(INST3_ADDEND)));
    }

    // Both fp16 halves as integers in units of 2^-13: mantissa with its leading one, times 2^e, signed.
    static I fixed(I x) {
        const I powers = _mm256_broadcastsi128_si256(_mm_setr_epi8(4, 8, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
        const I mantissa = _mm256_xor_si256(_mm256_and_si256(x, splat(0x03ff03ff)), splat(0x07600760));
        const I exponent = _mm256_and_si256(_mm256_srli_epi16(x, 10), splat(0x00030003));
        // The upper byte of each word asks for zero.
        const I factor = _mm256_shuffle_epi8(powers, _mm256_or_si256(exponent, splat(int(0x80008000))));
        return _mm256_sign_epi16(_mm256_mullo_epi16(mantissa, factor), _mm256_or_si256(x, splat(0x00010001)));
    }

    I pair(I first, I second) const {
        const I sum = add_halves(fixed(hash(first)), fixed(hash(second)));
        return _mm256_mulhrs_epi16(sum, splat(0x40004000));  // halved, rounding up
    }
};

template <>
struct Decoder<MUL1> {
    static I sums(I state) {
        return _mm256_maddubs_epi16(_mm256_mullo_epi32(state, splat(int(MUL1_MULTIPLIER))), splat(0x01010101));
    }

    I pair(I first, I second) const { return add_halves(sums(first), sums(second)); }
};

}  // namespace

// Codebooks under AVX2: a vector of states as words to int16 weights.
//
// A hash is the state times 32 bits, whose lower and upper halves are computed as words of their own: so all lanes of
// every instruction work on 16 states, where multiplications of dwords would be twice as many and slower.
#pragma once

#include "simd_avx2.h"

namespace {

struct Hash {
    I low, high;
};

// STATE times a constant, modulo 2^32.
inline Hash multiply_states(I state, uint32_t by) {
    const I lower = _mm256_set1_epi16(short(by)), upper = _mm256_set1_epi16(short(by >> 16));
    return {_mm256_mullo_epi16(state, lower),
            _mm256_add_epi16(_mm256_mulhi_epu16(state, lower), _mm256_mullo_epi16(state, upper))};
}

template <int CODEBOOK>
struct Decoder {
    static_assert(CODEBOOK == INST3 || CODEBOOK == MCG, "mul1 has its own form");

    static Hash hash(I state) {
        if (CODEBOOK == MCG) return multiply_states(state, MCG_MULTIPLIER);
        Hash x = multiply_states(state, INST3_MULTIPLIER);
        const I addend = _mm256_set1_epi16(short(INST3_ADDEND));
        x.low = _mm256_add_epi16(x.low, addend);
        // -1 where the sum did not wrap, which takes back the carry that the constant has.
        const I kept = _mm256_cmpeq_epi16(_mm256_max_epu16(x.low, addend), x.low);
        x.high = _mm256_add_epi16(_mm256_add_epi16(x.high, _mm256_set1_epi16(short((INST3_ADDEND >> 16) + 1))), kept);
        return x;
    }

    // fp16 numbers as integers in units of 2^-13: mantissa with its leading one, times 2^e, signed.
    static I fixed(I x) {
        // The format ignores bits 12 to 14. With bit 12 set, the sign's operand is never zero, and the exponent's index
        // never one of the zeros here, which is what the upper bytes of the indices ask for.
        const __m128i by_exponent = _mm_setr_epi8(0, 0, 0, 0, 4, 8, 1, 2, 0, 0, 0, 0, 4, 8, 1, 2);
        const I signs = _mm256_or_si256(x, splat(0x10001000));
        const I factor = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(by_exponent), _mm256_srli_epi16(signs, 10));
        const I mantissa = _mm256_xor_si256(_mm256_and_si256(x, splat(0x03ff03ff)), splat(0x07600760));
        return _mm256_sign_epi16(_mm256_mullo_epi16(mantissa, factor), signs);
    }

    template <int J, class Windows, class Bits>
    I pair(const Windows& windows, const Bits& bits) const {
        const Hash x = hash(windows.template pair<J>(bits));
        const I sum = _mm256_add_epi16(fixed(x.low), fixed(x.high));
        return _mm256_mulhrs_epi16(sum, splat(0x40004000));  // halved, rounding up
    }
};

template <>
struct Decoder<MUL1> {
    template <int J, class Windows, class Bits>
    I pair(const Windows& windows, const Bits& bits) const {
        const Hash x = multiply_states(windows.template pair<J>(bits), MUL1_MULTIPLIER);
        const I ones = splat(0x01010101);
        return _mm256_add_epi16(_mm256_maddubs_epi16(x.low, ones), _mm256_maddubs_epi16(x.high, ones));
    }
};

}  // namespace

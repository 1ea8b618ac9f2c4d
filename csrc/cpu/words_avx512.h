// What decode_words.h needs of a set, for AVX-512.
#pragma once

#include "simd_avx512.h"

namespace {

inline W multiply_words_high(W a, W b) { return _mm512_mulhi_epu16(a, b); }
inline W halve_words(W a) { return _mm512_mulhrs_epi16(a, splat_word(0x4000)); }  // rounding up
inline W sum_bytes(W a, W b) {  // the four of a word of each
    const W ones = splat(0x01010101);
    return _mm512_add_epi16(_mm512_maddubs_epi16(a, ones), _mm512_maddubs_epi16(b, ones));
}

// high + constant, and one where SUM, which ADDEND was added to, wrapped.
inline W add_words_and_carry(W high, int constant, W sum, W addend) {
    const W plain = add_words(high, splat_word(constant));
    return _mm512_mask_add_epi16(plain, _mm512_cmplt_epu16_mask(sum, addend), plain, splat_word(1));
}

// (x & mask) ^ flipped
inline W masked_flipped(W x, int mask, int flipped) {
    return _mm512_ternarylogic_epi32(x, splat_word(mask), splat_word(flipped), 0x6a);
}

// Words as fp16 numbers in units of 2^-13, signed. The format ignores bits 12 to 14.
#ifdef __AVX512FP16__
inline W fixed_halves(W x) {
    // Exponents 12 to 15 become 24 to 27, and with one more the numbers are those units.
    const W scaled = add_words(masked_flipped(x, 0x8fff, 0x6b60), splat_word(0x0400));
    return _mm512_cvtph_epi16(_mm512_castsi512_ph(scaled));
}
#else
inline W fixed_halves(W x) {
    const W mantissa = masked_flipped(x, 0x03ff, 0x0760);
    const W exponent = masked_flipped(_mm512_srli_epi16(x, 10), 3, 2);
    const W magnitude = _mm512_sllv_epi16(mantissa, exponent);
    return _mm512_mask_sub_epi16(magnitude, _mm512_movepi16_mask(x), splat(0), magnitude);
}
#endif

}  // namespace

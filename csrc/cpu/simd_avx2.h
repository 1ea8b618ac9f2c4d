// The vector type of `linear_kernels.h` for AVX2 with FMA and F16C, with or without VNNI.
#pragma once

#include <immintrin.h>

#include "format.h"
#include "kernels.h"
#include "repeat.h"

namespace {

constexpr int LANES = 8;
constexpr int STRIP_ROWS = 2, FUSED_ROWS = 2, BUFFERED_ROWS = 2, MULTIPLY_ROWS = 4, PANEL_VECTORS = 2;

using I = __m256i;
using F = __m256;

inline I splat(int32_t value) { return _mm256_set1_epi32(value); }
inline F splat_float(float value) { return _mm256_set1_ps(value); }
inline I load(const void* from) { return _mm256_loadu_si256(static_cast<const I*>(from)); }
inline void store(void* to, I a) { _mm256_storeu_si256(static_cast<I*>(to), a); }
inline F load_float(const float* from) { return _mm256_loadu_ps(from); }
inline void store_float(float* to, F a) { _mm256_storeu_ps(to, a); }
inline __m128i load_words(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
inline void store_words(void* to, __m128i a) { _mm_storeu_si128(static_cast<__m128i*>(to), a); }
inline F load_half(const uint16_t* from) { return _mm256_cvtph_ps(load_words(from)); }
inline F load_bfloat(const uint16_t* from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_words(from)), 16));
}
inline void store_half(uint16_t* to, F a) { store_words(to, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
inline void store_bfloat(uint16_t* to, F a) {
    const I bits = _mm256_castps_si256(a);
    const I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), splat(1));
    const I rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, splat(0x7fff)));
    const I nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const I kept = _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, splat(0x400000)), nan);
    const I words = _mm256_srli_epi32(kept, 16);
    const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xd8);
    store_words(to, _mm256_castsi256_si128(packed));
}
inline void store_int16(int16_t* to, I a) {
    store_words(to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packs_epi32(a, a), 0xd8)));
}

inline I add(I a, I b) { return _mm256_add_epi32(a, b); }
inline I maximum(I a, I b) { return _mm256_max_epi32(a, b); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F subtract(F a, F b) { return _mm256_sub_ps(a, b); }
inline F multiply(F a, F b) { return _mm256_mul_ps(a, b); }
inline F multiply_add(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F maximum(F a, F b) { return _mm256_max_ps(a, b); }
inline F absolute(F a) { return _mm256_andnot_ps(splat_float(-0.0f), a); }
inline F to_float(I a) { return _mm256_cvtepi32_ps(a); }
inline I round_to_int(F a) { return _mm256_cvtps_epi32(a); }
inline I magnitude_bits(F a) { return _mm256_and_si256(_mm256_castps_si256(a), splat(0x7fffffff)); }

// Of all lanes; what it costs does not matter beside a block's other work.
inline int32_t largest_lane(I a) {
    int32_t lanes[LANES];
    store(lanes, a);
    for (int i = 1; i < LANES; i++) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
    return lanes[0];
}

inline float largest_lane(F a) {
    float lanes[LANES];
    store_float(lanes, a);
    for (int i = 1; i < LANES; i++) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
    return lanes[0];
}

inline int32_t sum_lanes(I a) {
    int32_t lanes[LANES];
    store(lanes, a);
    for (int i = 1; i < LANES; i++) lanes[0] += lanes[i];
    return lanes[0];
}

inline float sum_lanes(F a) {
    float lanes[LANES];
    store_float(lanes, a);
    for (int i = 1; i < LANES; i++) lanes[0] += lanes[i];
    return lanes[0];
}

// Stages 1, 2 and 4 of the Hadamard transform: each lane's partner plus or minus itself.
inline F hadamard_vector(F a) {
    const F odd = _mm256_setr_ps(0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f);
    const F upper_pair = _mm256_setr_ps(0.0f, 0.0f, -0.0f, -0.0f, 0.0f, 0.0f, -0.0f, -0.0f);
    const F upper_half = _mm256_setr_ps(0.0f, 0.0f, 0.0f, 0.0f, -0.0f, -0.0f, -0.0f, -0.0f);
    a = _mm256_add_ps(_mm256_permute_ps(a, 0xb1), _mm256_xor_ps(a, odd));
    a = _mm256_add_ps(_mm256_permute_ps(a, 0x4e), _mm256_xor_ps(a, upper_pair));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, a, 1), _mm256_xor_ps(a, upper_half));
}

// acc + the dot product of each lane's two int16.
inline I dot(I acc, I w, I a) {
#ifdef __AVXVNNI__
    return _mm256_dpwssd_avx_epi32(acc, w, a);
#else
    return _mm256_add_epi32(acc, _mm256_madd_epi16(w, a));
#endif
}

// Four pairs of activations, each for the two columns of a lane.
inline I load_rows(const int16_t* a) {
    const I order = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    return _mm256_permutevar8x32_epi32(_mm256_castsi128_si256(load_words(a)), order);
}

inline I splat_pair(const int16_t* a) {
    int32_t pair;
    std::memcpy(&pair, a, sizeof pair);
    return splat(pair);
}

// Groups hold the four lanes of one column pair: qword r is row r.
inline void split_rows(I (&z)[4]) {
    const I even01 = _mm256_unpacklo_epi64(z[0], z[1]), odd01 = _mm256_unpackhi_epi64(z[0], z[1]);
    const I even23 = _mm256_unpacklo_epi64(z[2], z[3]), odd23 = _mm256_unpackhi_epi64(z[2], z[3]);
    z[0] = _mm256_permute2x128_si256(even01, even23, 0x20);
    z[1] = _mm256_permute2x128_si256(odd01, odd23, 0x20);
    z[2] = _mm256_permute2x128_si256(even01, even23, 0x31);
    z[3] = _mm256_permute2x128_si256(odd01, odd23, 0x31);
}

inline I add_rows(const I (&z)[4]) {
    const I a = add(_mm256_unpacklo_epi64(z[0], z[1]), _mm256_unpackhi_epi64(z[0], z[1]));
    const I b = add(_mm256_unpacklo_epi64(z[2], z[3]), _mm256_unpackhi_epi64(z[2], z[3]));
    return add(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

EXL3_INLINE inline void prefetch(const void* address) { _mm_prefetch(static_cast<const char*>(address), _MM_HINT_T0); }

// ---- vectors of 16 words, for the encoder

constexpr int WORDS = 16;
using W = __m256i;

inline W load_word_vector(const void* from) { return load(from); }
inline W splat_word(int value) { return _mm256_set1_epi16(short(value)); }
inline W add_words(W a, W b) { return _mm256_add_epi16(a, b); }
inline W add_words_saturated(W a, W b) { return _mm256_adds_epu16(a, b); }
inline W subtract_words(W a, W b) { return _mm256_sub_epi16(a, b); }
inline W multiply_words(W a, W b) { return _mm256_mullo_epi16(a, b); }
inline W clamp_words(W a, W low, W high) { return _mm256_max_epi16(_mm256_min_epi16(a, high), low); }
inline W least_words(W a, W b) { return _mm256_min_epu16(a, b); }

// Fills a vector with copies of COUNT words.
template <int COUNT>
inline W repeat_words(const uint16_t* from) {
    if constexpr (COUNT == 16) return load(from);
    if constexpr (COUNT == 8) return _mm256_broadcastsi128_si256(load_words(from));
    uint64_t words = 0;
    std::memcpy(&words, from, COUNT * sizeof(uint16_t));
    if constexpr (COUNT == 4) return _mm256_set1_epi64x(int64_t(words));
    if constexpr (COUNT == 2) return _mm256_set1_epi32(int32_t(words));
    return splat_word(int(words));
}

// ---- words and bytes, for decode_words.h and windows_words.h

inline W both(W a, W b) { return _mm256_and_si256(a, b); }
inline W either(W a, W b) { return _mm256_or_si256(a, b); }
inline W differ(W a, W b) { return _mm256_xor_si256(a, b); }
inline W multiply_words_high(W a, W b) { return _mm256_mulhi_epu16(a, b); }
template <int COUNT>
inline W shift_words_right(W a) {
    return _mm256_srli_epi16(a, COUNT);
}
// -1 where a is not below b, without signs.
inline W at_least(W a, W b) { return _mm256_cmpeq_epi16(_mm256_max_epu16(a, b), a); }
inline W with_sign_of(W a, W sign) { return _mm256_sign_epi16(a, sign); }
inline W halve_words(W a) { return _mm256_mulhrs_epi16(a, splat_word(0x4000)); }  // rounding up
inline W sum_bytes(W a, W b) {  // the four of a word of each
    const W ones = _mm256_set1_epi8(1);
    return _mm256_add_epi16(_mm256_maddubs_epi16(a, ones), _mm256_maddubs_epi16(b, ones));
}
// Bytes of a table of 16, by the lower four bits of each byte below 128.
inline W look_up(const uint8_t (&table)[16], W index) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_words(table)), index);
}

// Within each half; a negative index gives zero.
inline I shuffle_bytes(I a, I order) { return _mm256_shuffle_epi8(a, order); }
inline I load_halves(const uint8_t* low, const uint8_t* high) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load_words(low)), load_words(high), 1);
}
inline I shift_counts_right(I counts) { return counts; }
inline I shift_right(I a, I counts) { return _mm256_srlv_epi32(a, counts); }
inline I shift_left(I a, I counts) { return _mm256_sllv_epi32(a, counts); }
// The lower words of a's dwords and the upper ones of b's.
inline I join_words(I a, I b) { return _mm256_blend_epi16(a, b, 0xaa); }

// Copies an even number of dwords with the bytes of each in reverse.
inline void reverse_bytes(uint8_t* to, const uint32_t* from, int dwords) {
    const __m128i half = _mm_setr_epi8(3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12);
    const I order = _mm256_broadcastsi128_si256(half);
    int done = 0;
    for (; done + 8 <= dwords; done += 8) store(to + 4 * done, _mm256_shuffle_epi8(load(from + done), order));
    if (dwords & 4) {
        store_words(to + 4 * done, _mm_shuffle_epi8(load_words(from + done), half));
        done += 4;
    }
    // Half-integer rates end in the middle of 16 bytes.
    if (dwords & 2) {
        const __m128i last = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + done));
        store_words(to + 4 * done, _mm_shuffle_epi8(last, half));
    }
}

// Bytes of each half, by the place they come from: words 0, 2, 4, 6, 1, 3, 5, 7 for two columns, 0, 4, 1, 5, 2, 6, 3, 7
// for four.
inline W order_words(W a, int columns) {
    const __m128i two = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m128i four = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return _mm256_shuffle_epi8(a, _mm256_broadcastsi128_si256(columns == 2 ? two : four));
}

inline W lower_halves(W a, W b) { return _mm256_permute2x128_si256(a, b, 0x20); }
inline W upper_halves(W a, W b) { return _mm256_permute2x128_si256(a, b, 0x31); }

// Stores a group of edges, taken out of the lanes' order: the 32 lanes are a matrix of 2^IN_SHIFT rows, transposed here.
template <int IN_SHIFT>
inline void store_edges(uint16_t* to, const W (&lanes)[2]) {
    W a = lanes[0], b = lanes[1];
    if constexpr (IN_SHIFT == 1) {
        const W low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
        a = lower_halves(low, high);
        b = upper_halves(low, high);
    }
    if constexpr (IN_SHIFT == 2) {
        const W order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        const W even = lower_halves(a, b), odd = upper_halves(a, b);
        a = _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi16(even, odd), order);
        b = _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi16(even, odd), order);
    }
    if constexpr (IN_SHIFT == 3) {
        const W order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        const W first = _mm256_permutevar8x32_epi32(order_words(a, 4), order);
        const W second = _mm256_permutevar8x32_epi32(order_words(b, 4), order);
        const W even = _mm256_unpacklo_epi64(first, second), odd = _mm256_unpackhi_epi64(first, second);
        a = lower_halves(even, odd);
        b = upper_halves(even, odd);
    }
    if constexpr (IN_SHIFT == 4) {
        const W first = order_words(a, 2), second = order_words(b, 2);
        a = _mm256_permute4x64_epi64(_mm256_unpacklo_epi64(first, second), 0xd8);
        b = _mm256_permute4x64_epi64(_mm256_unpackhi_epi64(first, second), 0xd8);
    }
    store(to, a);
    store(to + WORDS, b);
}

}  // namespace

// The vector type of `linear_kernels.h` for AVX-512 (F, BW, VL, DQ), with VNNI, VBMI and VBMI2 used
// where the translation unit is compiled for them.
#pragma once

#include <immintrin.h>

#include "format.h"
#include "kernels.h"
#include "repeat.h"

namespace {

constexpr int LANES = 16;
constexpr int STRIP_ROWS = 16, FUSED_ROWS = 4, BUFFERED_ROWS = 6, MULTIPLY_ROWS = 6, PANEL_VECTORS = 4;

using I = __m512i;
using F = __m512;

inline I splat(int32_t value) { return _mm512_set1_epi32(value); }
inline F splat_float(float value) { return _mm512_set1_ps(value); }
inline I load(const void* from) { return _mm512_loadu_si512(from); }
inline void store(void* to, I a) { _mm512_storeu_si512(to, a); }
inline F load_float(const float* from) { return _mm512_loadu_ps(from); }
inline void store_float(float* to, F a) { _mm512_storeu_ps(to, a); }
inline __m256i load_words(const uint16_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline void store_words(void* to, __m256i a) { _mm256_storeu_si256(static_cast<__m256i*>(to), a); }
inline F load_half(const uint16_t* from) { return _mm512_cvtph_ps(load_words(from)); }
inline F load_bfloat(const uint16_t* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_words(from)), 16));
}
inline void store_half(uint16_t* to, F a) { store_words(to, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
inline void store_bfloat(uint16_t* to, F a) {
    const I bits = _mm512_castps_si512(a);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), splat(1));
    const I rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, splat(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const I kept = _mm512_mask_or_epi32(rounded, nan, bits, splat(0x400000));
    store_words(to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}
inline void store_int16(int16_t* to, I a) { store_words(to, _mm512_cvtepi32_epi16(a)); }

inline I add(I a, I b) { return _mm512_add_epi32(a, b); }
inline I maximum(I a, I b) { return _mm512_max_epi32(a, b); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F subtract(F a, F b) { return _mm512_sub_ps(a, b); }
inline F multiply(F a, F b) { return _mm512_mul_ps(a, b); }
inline F multiply_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F maximum(F a, F b) { return _mm512_max_ps(a, b); }
inline F absolute(F a) { return _mm512_abs_ps(a); }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
inline I round_to_int(F a) { return _mm512_cvtps_epi32(a); }
inline I magnitude_bits(F a) { return _mm512_and_si512(_mm512_castps_si512(a), splat(0x7fffffff)); }

inline int32_t largest_lane(I a) { return _mm512_reduce_max_epi32(a); }
inline float largest_lane(F a) { return _mm512_reduce_max_ps(a); }
inline int32_t sum_lanes(I a) { return _mm512_reduce_add_epi32(a); }
inline float sum_lanes(F a) { return _mm512_reduce_add_ps(a); }

// a with the sign of the lanes in `mask` flipped.
inline F negate(F a, __mmask16 mask) { return _mm512_mask_sub_ps(a, mask, _mm512_setzero_ps(), a); }

// Stages 1 to 8 of the Hadamard transform: each lane's partner plus or minus itself.
inline F hadamard_vector(F a) {
    a = _mm512_add_ps(_mm512_permute_ps(a, 0xb1), negate(a, 0xaaaa));
    a = _mm512_add_ps(_mm512_permute_ps(a, 0x4e), negate(a, 0xcccc));
    a = _mm512_add_ps(_mm512_shuffle_f32x4(a, a, 0xb1), negate(a, 0xf0f0));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, a, 0x4e), negate(a, 0xff00));
}

// acc + the dot product of each lane's two int16.
inline I dot(I acc, I w, I a) {
#ifdef __AVX512VNNI__
    // Written out because GCC 12 copies the accumulators of the intrinsic to the stack at every turn
    // of some loops, which halves their speed.
    asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a));
    return acc;
#else
    return _mm512_add_epi32(acc, _mm512_madd_epi16(w, a));
#endif
}

// Four pairs of activations, each for the two columns of a lane, and again for the lanes i + 4.
inline I load_rows(const int16_t* a) {
    const I order = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2, 3, 3);
    return _mm512_permutexvar_epi32(order, _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)a)));
}

inline I splat_pair(const int16_t* a) {
    int32_t pair;
    __builtin_memcpy(&pair, a, sizeof pair);
    return splat(pair);
}

// Groups hold lanes of two column pairs: qword 4c + r is row r of pair c. The first two exchanges
// give rows 0, 1 (and 2, 3) of two groups in the halves of one vector.
inline I rows_01(I a, I b) {
    return _mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 4, 8, 12, 1, 5, 9, 13), b);
}
inline I rows_23(I a, I b) {
    return _mm512_permutex2var_epi64(a, _mm512_setr_epi64(2, 6, 10, 14, 3, 7, 11, 15), b);
}
inline I lower_halves(I a, I b) { return _mm512_shuffle_i64x2(a, b, 0x44); }
inline I upper_halves(I a, I b) { return _mm512_shuffle_i64x2(a, b, 0xee); }

inline void split_rows(I (&z)[4]) {
    const I a = rows_01(z[0], z[1]), b = rows_01(z[2], z[3]);
    const I c = rows_23(z[0], z[1]), d = rows_23(z[2], z[3]);
    z[0] = lower_halves(a, b);
    z[1] = upper_halves(a, b);
    z[2] = lower_halves(c, d);
    z[3] = upper_halves(c, d);
}

inline I add_rows(const I (&z)[4]) {
    const I a = add(rows_01(z[0], z[1]), rows_23(z[0], z[1]));
    const I b = add(rows_01(z[2], z[3]), rows_23(z[2], z[3]));
    return add(lower_halves(a, b), upper_halves(a, b));
}

EXL3_INLINE inline void prefetch(const void* address) { _mm_prefetch(static_cast<const char*>(address), _MM_HINT_T0); }

// ---- vectors of 32 words, for the encoder

constexpr int WORDS = 32;
using W = __m512i;

inline W load_word_vector(const void* from) { return _mm512_loadu_si512(from); }
inline W splat_word(int value) { return _mm512_set1_epi16(short(value)); }
inline W add_words(W a, W b) { return _mm512_add_epi16(a, b); }
inline W add_words_saturated(W a, W b) { return _mm512_adds_epu16(a, b); }
inline W subtract_words(W a, W b) { return _mm512_sub_epi16(a, b); }
inline W multiply_words(W a, W b) { return _mm512_mullo_epi16(a, b); }
inline W clamp_words(W a, W low, W high) { return _mm512_max_epi16(_mm512_min_epi16(a, high), low); }
inline W least_words(W a, W b) { return _mm512_min_epu16(a, b); }

// Fills a vector with copies of COUNT words.
template <int COUNT>
inline W repeat_words(const uint16_t* from) {
    if constexpr (COUNT == 16) return _mm512_broadcast_i64x4(load_words(from));
    if constexpr (COUNT == 8) return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    uint64_t words = 0;
    __builtin_memcpy(&words, from, COUNT * sizeof(uint16_t));
    if constexpr (COUNT == 4) return _mm512_set1_epi64(int64_t(words));
    if constexpr (COUNT == 2) return _mm512_set1_epi32(int32_t(words));
    return splat_word(int(words));
}

// Where in its group's lanes each edge is.
template <int IN_SHIFT>
struct LaneOfEdge {
    uint16_t lane[exl3::ENCODE_GROUP] = {};

    constexpr LaneOfEdge() {
        for (int i = 0; i < exl3::ENCODE_GROUP; i++) lane[exl3::edge_of_lane(IN_SHIFT, i)] = uint16_t(i);
    }
};

// Stores a group of edges, taken out of the lanes' order.
template <int IN_SHIFT>
inline void store_edges(uint16_t* to, const W (&lanes)[1]) {
    if constexpr (IN_SHIFT >= 5) {
        store(to, lanes[0]);
    } else {
        alignas(64) static constexpr LaneOfEdge<IN_SHIFT> order;
        store(to, _mm512_permutexvar_epi16(load(order.lane), lanes[0]));
    }
}

}  // namespace

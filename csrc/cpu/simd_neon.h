// The vector type of `linear_kernels.h` for aarch64: two NEON registers as one vector of eight dwords.
#pragma once

#include <arm_neon.h>

#include <cstring>

#include "format.h"
#include "kernels.h"
#include "repeat.h"

namespace {

constexpr int LANES = 8;
constexpr int STRIP_ROWS = 2, FUSED_ROWS = 2, BUFFERED_ROWS = 2, MULTIPLY_ROWS = 4, PANEL_VECTORS = 2;

struct I {
    int32x4_t a, b;  // lanes 0 to 3 and 4 to 7
};
struct F {
    float32x4_t a, b;
};

inline I splat(int32_t value) { return {vdupq_n_s32(value), vdupq_n_s32(value)}; }
inline F splat_float(float value) { return {vdupq_n_f32(value), vdupq_n_f32(value)}; }
inline int32x4_t load_four(const void* from) { return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(from))); }
inline I load(const void* from) { return {load_four(from), load_four(static_cast<const char*>(from) + 16)}; }
inline void store(void* to, I v) {
    vst1q_u8(static_cast<uint8_t*>(to), vreinterpretq_u8_s32(v.a));
    vst1q_u8(static_cast<uint8_t*>(to) + 16, vreinterpretq_u8_s32(v.b));
}
inline F load_float(const float* from) { return {vld1q_f32(from), vld1q_f32(from + 4)}; }
inline void store_float(float* to, F v) {
    vst1q_f32(to, v.a);
    vst1q_f32(to + 4, v.b);
}
inline F load_half(const uint16_t* from) {
    const auto four = [](const uint16_t* at) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))); };
    return {four(from), four(from + 4)};
}
inline F load_bfloat(const uint16_t* from) {
    const auto four = [](const uint16_t* at) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(at), 16)); };
    return {four(from), four(from + 4)};
}
inline void store_half(uint16_t* to, F v) {
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(v.a)));
    vst1_u16(to + 4, vreinterpret_u16_f16(vcvt_f16_f32(v.b)));
}
inline void store_bfloat(uint16_t* to, F v) {
    const auto four = [](float32x4_t x) {
        const uint32x4_t bits = vreinterpretq_u32_f32(x);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        const uint32x4_t number = vceqq_f32(x, x);
        return vshrn_n_u32(vbslq_u32(number, rounded, vorrq_u32(bits, vdupq_n_u32(0x400000))), 16);
    };
    vst1_u16(to, four(v.a));
    vst1_u16(to + 4, four(v.b));
}
inline void store_int16(int16_t* to, I v) { vst1q_s16(to, vcombine_s16(vqmovn_s32(v.a), vqmovn_s32(v.b))); }

inline I add(I v, I w) { return {vaddq_s32(v.a, w.a), vaddq_s32(v.b, w.b)}; }
inline I maximum(I v, I w) { return {vmaxq_s32(v.a, w.a), vmaxq_s32(v.b, w.b)}; }
inline F add(F v, F w) { return {vaddq_f32(v.a, w.a), vaddq_f32(v.b, w.b)}; }
inline F subtract(F v, F w) { return {vsubq_f32(v.a, w.a), vsubq_f32(v.b, w.b)}; }
inline F multiply(F v, F w) { return {vmulq_f32(v.a, w.a), vmulq_f32(v.b, w.b)}; }
inline F multiply_add(F v, F w, F x) { return {vfmaq_f32(x.a, v.a, w.a), vfmaq_f32(x.b, v.b, w.b)}; }
inline F maximum(F v, F w) { return {vmaxq_f32(v.a, w.a), vmaxq_f32(v.b, w.b)}; }
inline F absolute(F v) { return {vabsq_f32(v.a), vabsq_f32(v.b)}; }
inline F to_float(I v) { return {vcvtq_f32_s32(v.a), vcvtq_f32_s32(v.b)}; }
inline I round_to_int(F v) { return {vcvtnq_s32_f32(v.a), vcvtnq_s32_f32(v.b)}; }
inline I magnitude_bits(F v) { return {vreinterpretq_s32_f32(vabsq_f32(v.a)), vreinterpretq_s32_f32(vabsq_f32(v.b))}; }

// In the order in which the other files add, so that activations are quantised to the same bits.
inline int32_t largest_lane(I v) { return vmaxvq_s32(vmaxq_s32(v.a, v.b)); }
inline float largest_lane(F v) { return vmaxvq_f32(vmaxq_f32(v.a, v.b)); }
inline int32_t sum_lanes(I v) { return vaddvq_s32(vaddq_s32(v.a, v.b)); }
inline float sum_lanes(F v) {
    float lanes[LANES];
    store_float(lanes, v);
    for (int i = 1; i < LANES; i++) lanes[0] += lanes[i];
    return lanes[0];
}

// Stages 1, 2 and 4 of the Hadamard transform: each lane's partner plus or minus itself.
inline F hadamard_vector(F v) {
    const auto negate = [](float32x4_t x, uint32x4_t signs) {
        return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(x), signs));
    };
    const auto four = [&](float32x4_t x) {
        const uint32x4_t odd = vreinterpretq_u32_u64(vdupq_n_u64(0x8000000000000000));
        const uint32x4_t upper = vcombine_u32(vdup_n_u32(0), vdup_n_u32(0x80000000));
        x = vaddq_f32(vrev64q_f32(x), negate(x, odd));
        return vaddq_f32(vextq_f32(x, x, 2), negate(x, upper));
    };
    const float32x4_t low = four(v.a), high = four(v.b);
    return {vaddq_f32(low, high), vsubq_f32(low, high)};
}

// acc + the dot product of each lane's two int16.
inline int32x4_t dot_four(int32x4_t acc, int32x4_t w, int32x4_t x) {
    const int16x8_t weights = vreinterpretq_s16_s32(w), values = vreinterpretq_s16_s32(x);
    const int32x4_t low = vmull_s16(vget_low_s16(weights), vget_low_s16(values));
    return vaddq_s32(acc, vpaddq_s32(low, vmull_high_s16(weights, values)));
}
inline I dot(I acc, I w, I x) { return {dot_four(acc.a, w.a, x.a), dot_four(acc.b, w.b, x.b)}; }

// Four pairs of activations, each for the two columns of a lane.
inline I load_rows(const int16_t* from) {
    const int32x4_t pairs = load_four(from);
    return {vzip1q_s32(pairs, pairs), vzip2q_s32(pairs, pairs)};
}

inline I splat_pair(const int16_t* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof pair);
    return splat(pair);
}

inline int32x4_t first_qwords(int32x4_t v, int32x4_t w) {
    return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(v), vreinterpretq_s64_s32(w)));
}
inline int32x4_t second_qwords(int32x4_t v, int32x4_t w) {
    return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(v), vreinterpretq_s64_s32(w)));
}

// Groups hold the four lanes of one column pair: qword r is row r.
inline void split_rows(I (&z)[4]) {
    const I rows[4] = {{first_qwords(z[0].a, z[1].a), first_qwords(z[2].a, z[3].a)},
                       {second_qwords(z[0].a, z[1].a), second_qwords(z[2].a, z[3].a)},
                       {first_qwords(z[0].b, z[1].b), first_qwords(z[2].b, z[3].b)},
                       {second_qwords(z[0].b, z[1].b), second_qwords(z[2].b, z[3].b)}};
    repeat<4>([&](auto row) EXL3_INLINE { z[row] = rows[row]; });
}

inline I add_rows(const I (&z)[4]) {
    int32x4_t s[4];
    repeat<4>([&](auto i) EXL3_INLINE { s[i] = vaddq_s32(z[i].a, z[i].b); });
    return {vaddq_s32(first_qwords(s[0], s[1]), second_qwords(s[0], s[1])),
            vaddq_s32(first_qwords(s[2], s[3]), second_qwords(s[2], s[3]))};
}

EXL3_INLINE inline void prefetch(const void* address) { __builtin_prefetch(address); }

// ---- vectors of 16 words

constexpr int WORDS = 16;
using W = I;

inline uint16x8_t words(int32x4_t v) { return vreinterpretq_u16_s32(v); }
inline int16x8_t signed_words(int32x4_t v) { return vreinterpretq_s16_s32(v); }
inline int32x4_t from_words(uint16x8_t v) { return vreinterpretq_s32_u16(v); }
inline int32x4_t from_words(int16x8_t v) { return vreinterpretq_s32_s16(v); }

#define EXL3_EACH_HALF(name, read, function) \
    inline W name(W v, W w) { \
        return {from_words(function(read(v.a), read(w.a))), from_words(function(read(v.b), read(w.b)))}; \
    }

EXL3_EACH_HALF(add_words, words, vaddq_u16)
EXL3_EACH_HALF(add_words_saturated, words, vqaddq_u16)
EXL3_EACH_HALF(subtract_words, words, vsubq_u16)
EXL3_EACH_HALF(multiply_words, words, vmulq_u16)
EXL3_EACH_HALF(least_words, words, vminq_u16)
EXL3_EACH_HALF(least_signed_words, signed_words, vminq_s16)
EXL3_EACH_HALF(most_signed_words, signed_words, vmaxq_s16)
EXL3_EACH_HALF(both, words, vandq_u16)
EXL3_EACH_HALF(either, words, vorrq_u16)
EXL3_EACH_HALF(differ, words, veorq_u16)
EXL3_EACH_HALF(at_least, words, vcgeq_u16)  // -1 where v is not below w, without signs
#undef EXL3_EACH_HALF

inline W load_word_vector(const void* from) { return load(from); }
inline W splat_word(int value) {
    const int32x4_t v = from_words(vdupq_n_u16(uint16_t(value)));
    return {v, v};
}
inline W clamp_words(W v, W low, W high) { return most_signed_words(least_signed_words(v, high), low); }

inline uint16x8_t upper_products(uint16x8_t v, uint16x8_t w) {
    const uint32x4_t low = vmull_u16(vget_low_u16(v), vget_low_u16(w)), high = vmull_high_u16(v, w);
    return vuzp2q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high));
}
inline W multiply_words_high(W v, W w) {
    return {from_words(upper_products(words(v.a), words(w.a))), from_words(upper_products(words(v.b), words(w.b)))};
}
template <int COUNT>
inline W shift_words_right(W v) {
    return {from_words(vshrq_n_u16(words(v.a), COUNT)), from_words(vshrq_n_u16(words(v.b), COUNT))};
}
inline int16x8_t negated_where_negative(int16x8_t v, int16x8_t sign) {
    const int16x8_t mask = vshrq_n_s16(sign, 15);
    return vsubq_s16(veorq_s16(v, mask), mask);
}
inline W with_sign_of(W v, W sign) {
    return {from_words(negated_where_negative(signed_words(v.a), signed_words(sign.a))),
            from_words(negated_where_negative(signed_words(v.b), signed_words(sign.b)))};
}
inline W halve_words(W v) {  // rounding up
    return {from_words(vrshrq_n_s16(signed_words(v.a), 1)), from_words(vrshrq_n_s16(signed_words(v.b), 1))};
}
inline W sum_bytes(W v, W w) {  // the four of a word of each
    const auto eight = [](int32x4_t x, int32x4_t y) {
        return from_words(vpadalq_u8(vpaddlq_u8(vreinterpretq_u8_s32(x)), vreinterpretq_u8_s32(y)));
    };
    return {eight(v.a, w.a), eight(v.b, w.b)};
}

inline int32x4_t pick_bytes(int32x4_t v, int32x4_t order) {
    return vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(v), vreinterpretq_u8_s32(order)));
}
// Bytes of a table of 16, by the lower four bits of each byte below 128.
inline W look_up(const uint8_t (&table)[16], W index) {
    const int32x4_t bytes = load_four(table), four = vreinterpretq_s32_u8(vdupq_n_u8(15));
    return {pick_bytes(bytes, vandq_s32(index.a, four)), pick_bytes(bytes, vandq_s32(index.b, four))};
}

// Within each half; a negative index gives zero.
inline I shuffle_bytes(I v, I order) { return {pick_bytes(v.a, order.a), pick_bytes(v.b, order.b)}; }
inline I load_halves(const uint8_t* low, const uint8_t* high) { return {load_four(low), load_four(high)}; }
// Shifts go left by signed counts.
inline I shift_counts_right(I counts) { return {vnegq_s32(counts.a), vnegq_s32(counts.b)}; }
inline int32x4_t shift_four(int32x4_t v, int32x4_t counts) {
    return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(v), counts));
}
inline I shift_left(I v, I counts) { return {shift_four(v.a, counts.a), shift_four(v.b, counts.b)}; }
inline I shift_right(I v, I counts) { return shift_left(v, counts); }
// The lower words of v's dwords and the upper ones of w's.
inline int32x4_t join_four(int32x4_t v, int32x4_t w) { return vbslq_s32(vdupq_n_u32(0xffff), v, w); }
inline I join_words(I v, I w) { return {join_four(v.a, w.a), join_four(v.b, w.b)}; }

// Copies an even number of dwords with the bytes of each in reverse.
inline void reverse_bytes(uint8_t* to, const uint32_t* from, int dwords) {
    for (int done = 0; done < dwords; done += 2) {
        vst1_u8(to + 4 * done, vrev32_u8(vreinterpret_u8_u32(vld1_u32(from + done))));
    }
}

// Fills a vector with copies of COUNT words.
template <int COUNT>
inline W repeat_words(const uint16_t* from) {
    if constexpr (COUNT == 16) return load(from);
    uint16x8_t v;
    if constexpr (COUNT == 8) v = vld1q_u16(from);
    uint64_t few = 0;
    if constexpr (COUNT < 8) std::memcpy(&few, from, COUNT * sizeof(uint16_t));
    if constexpr (COUNT == 4) v = vreinterpretq_u16_u64(vdupq_n_u64(few));
    if constexpr (COUNT == 2) v = vreinterpretq_u16_u32(vdupq_n_u32(uint32_t(few)));
    if constexpr (COUNT == 1) v = vdupq_n_u16(uint16_t(few));
    return {from_words(v), from_words(v)};
}

// Stores a group of edges, taken out of the lanes' order: the 32 lanes are a matrix of 2^IN_SHIFT rows, transposed here.
template <int IN_SHIFT>
inline void store_edges(uint16_t* to, const W (&lanes)[2]) {
    const uint16x8_t r0 = words(lanes[0].a), r1 = words(lanes[0].b), r2 = words(lanes[1].a), r3 = words(lanes[1].b);
    if constexpr (IN_SHIFT == 1) {
        vst2q_u16(to, {{r0, r2}});
        vst2q_u16(to + 16, {{r1, r3}});
    } else if constexpr (IN_SHIFT == 2) {
        vst4q_u16(to, {{r0, r1, r2, r3}});
    } else if constexpr (IN_SHIFT == 3 || IN_SHIFT == 4) {
        const uint16x8_t even0 = vuzp1q_u16(r0, r1), even1 = vuzp1q_u16(r2, r3);
        const uint16x8_t odd0 = vuzp2q_u16(r0, r1), odd1 = vuzp2q_u16(r2, r3);
        if constexpr (IN_SHIFT == 4) {
            store(to, {from_words(even0), from_words(even1)});
            store(to + 16, {from_words(odd0), from_words(odd1)});
        } else {
            store(to, {from_words(vuzp1q_u16(even0, even1)), from_words(vuzp1q_u16(odd0, odd1))});
            store(to + 16, {from_words(vuzp2q_u16(even0, even1)), from_words(vuzp2q_u16(odd0, odd1))});
        }
    } else {
        store(to, lanes[0]);
        store(to + WORDS, lanes[1]);
    }
}

}  // namespace

// The vector type of `linear_kernels.h` in plain C++, for CPUs without an own file. Fixed-length
// loops over eight lanes, which compilers turn into whatever vectors the target has.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "format.h"
#include "kernels.h"
#include "repeat.h"
#include "tiles_in_place.h"

namespace {

constexpr int LANES = 8;
constexpr int STRIP_ROWS = 1, FUSED_ROWS = 1, BUFFERED_ROWS = 1, MULTIPLY_ROWS = 2, PANEL_VECTORS = 2;

struct I {
    int32_t v[LANES];
};
struct F {
    float v[LANES];
};

// Spares the compiler from repeating long loops in every unrolled kernel.
#define EXL3_OUTLINE __attribute__((noinline))

#define EACH_LANE for (int i = 0; i < LANES; i++)

// Unsigned arithmetic, because block sums may wrap on the way to a result that fits.
inline int32_t wrap_add(int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }

inline I splat(int32_t value) { I r; EACH_LANE r.v[i] = value; return r; }
inline F splat_float(float value) { F r; EACH_LANE r.v[i] = value; return r; }
inline I load(const void* from) { I r; std::memcpy(&r, from, sizeof r); return r; }
inline void store(void* to, I a) { std::memcpy(to, &a, sizeof a); }
inline F load_float(const float* from) { F r; std::memcpy(&r, from, sizeof r); return r; }
inline void store_float(float* to, F a) { std::memcpy(to, &a, sizeof a); }
EXL3_OUTLINE inline F load_half(const uint16_t* from) { F r; EACH_LANE r.v[i] = half_to_float(from[i]); return r; }
EXL3_OUTLINE inline F load_bfloat(const uint16_t* from) { F r; EACH_LANE r.v[i] = bfloat_to_float(from[i]); return r; }
EXL3_OUTLINE inline void store_half(uint16_t* to, F a) { EACH_LANE to[i] = float_to_half(a.v[i]); }
EXL3_OUTLINE inline void store_bfloat(uint16_t* to, F a) { EACH_LANE to[i] = float_to_bfloat(a.v[i]); }
inline void store_int16(int16_t* to, I a) { EACH_LANE to[i] = int16_t(a.v[i]); }

inline I add(I a, I b) { EACH_LANE a.v[i] = wrap_add(a.v[i], b.v[i]); return a; }
inline I maximum(I a, I b) { EACH_LANE a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
inline F add(F a, F b) { EACH_LANE a.v[i] += b.v[i]; return a; }
inline F subtract(F a, F b) { EACH_LANE a.v[i] -= b.v[i]; return a; }
inline F multiply(F a, F b) { EACH_LANE a.v[i] *= b.v[i]; return a; }
inline F multiply_add(F a, F b, F c) { EACH_LANE a.v[i] = a.v[i] * b.v[i] + c.v[i]; return a; }
inline F maximum(F a, F b) { EACH_LANE a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
inline F absolute(F a) { EACH_LANE a.v[i] = std::fabs(a.v[i]); return a; }
inline F to_float(I a) { F r; EACH_LANE r.v[i] = float(a.v[i]); return r; }
// Adding 1.5 · 2^23 leaves the integer, rounded to nearest even, in the mantissa. It is taken from there, of 16 bits as
// the callers' are: no integer stands for NaN, and to convert one is undefined.
inline int32_t rounded(float a) { return int16_t(uint16_t(float_bits(a + 0x1.8p23f))); }
EXL3_OUTLINE inline I round_to_int(F a) { I r; EACH_LANE r.v[i] = rounded(a.v[i]); return r; }
inline I magnitude_bits(F a) { I r; EACH_LANE r.v[i] = int32_t(float_bits(a.v[i]) & 0x7fffffff); return r; }

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

// Stages 1, 2 and 4 of the Hadamard transform.
EXL3_OUTLINE inline F hadamard_vector(F a) {
    for (int stride = 1; stride < LANES; stride *= 2) {
        F r;
        EACH_LANE r.v[i] = i & stride ? a.v[i ^ stride] - a.v[i] : a.v[i] + a.v[i ^ stride];
        a = r;
    }
    return a;
}

// acc + the dot product of each lane's two int16.
inline I dot(I acc, I w, I a) {
    EACH_LANE {
        const int32_t low = int16_t(w.v[i]) * int16_t(a.v[i]);
        const int32_t high = (w.v[i] >> 16) * (a.v[i] >> 16);
        acc.v[i] = wrap_add(acc.v[i], wrap_add(low, high));
    }
    return acc;
}

// Four pairs of activations, each for the two columns of a lane.
inline I load_rows(const int16_t* a) {
    int32_t pairs[4];
    std::memcpy(pairs, a, sizeof pairs);
    I r;
    EACH_LANE r.v[i] = pairs[i / 2];
    return r;
}

inline I splat_pair(const int16_t* a) {
    int32_t pair;
    std::memcpy(&pair, a, sizeof pair);
    return splat(pair);
}

// Groups hold four lanes (the rows of one column pair): row r becomes the vector of all columns.
inline void split_rows(I (&z)[4]) {
    I r[4];
    for (int row = 0; row < 4; row++) EACH_LANE r[row].v[i] = z[i / 2].v[2 * row + i % 2];
    for (int row = 0; row < 4; row++) z[row] = r[row];
}

inline I add_rows(const I (&z)[4]) {
    I r;
    EACH_LANE {
        const int32_t* lane = z[i / 2].v + i % 2;
        r.v[i] = wrap_add(wrap_add(lane[0], lane[2]), wrap_add(lane[4], lane[6]));
    }
    return r;
}

inline void prefetch(const void*) {}

// Dwords 2i, 2i + 1 of a group are lane i's windows j and j + 4.
struct Windows {
    using Tiles = TilesInPlace;
    struct Bits {
        const uint32_t* tile;
        int first;
    };
    int half_bits;

    explicit Windows(int half_bits) : half_bits(half_bits) {}
    Bits load(const uint32_t* tile, int group) const { return {tile, group * 32}; }

    template <int J>
    EXL3_OUTLINE I get(Bits bits) const {
        I r;
        EACH_LANE r.v[i] = int32_t(window(bits.tile, half_bits, bits.first + i / 2 * 8 + J + 4 * (i % 2)));
        return r;
    }
};
template <class Function>
void with_windows(int, Function&& function) {
    function(Kind<Windows>{});
}

// Two vectors of states to vectors of int16 pairs: the first state's weight in the low half.
template <int CODEBOOK>
struct Decoder {
    static int32_t weight(uint32_t state) {
        if (CODEBOOK == MUL1) {
            const uint32_t x = state * MUL1_MULTIPLIER;
            const uint32_t even = (x & 0xff00ff) + (x >> 8 & 0xff00ff);
            return int32_t((even & 0xffff) + (even >> 16));
        }
        const uint32_t x = CODEBOOK == MCG ? state * MCG_MULTIPLIER : state * INST3_MULTIPLIER + INST3_ADDEND;
        // Halving rounds up, as the vector forms do.
        return (fixed(x) + fixed(x >> 16) + 1) >> 1;
    }

    // A half of the masked word as an integer in units of 2^-13: its four exponents are -3 to 0.
    static int32_t fixed(uint32_t half) {
        const int32_t mantissa = int32_t((half & 0x3ff) ^ 0x760);
        const int32_t magnitude = mantissa << ((half >> 10 & 3) ^ 2);
        return half & 0x8000 ? -magnitude : magnitude;
    }

    EXL3_OUTLINE I pair(I first, I second) const {
        EACH_LANE {
            const uint32_t low = uint32_t(weight(uint32_t(first.v[i]))) & 0xffff;
            first.v[i] = int32_t(low | uint32_t(weight(uint32_t(second.v[i]))) << 16);
        }
        return first;
    }

    template <int J, class Windows, class Bits>
    I pair(const Windows& windows, const Bits& bits) const {
        return pair(windows.template get<J>(bits), windows.template get<J + 1>(bits));
    }
};

#undef EACH_LANE

// ---- vectors of 16 words, for the encoder

constexpr int WORDS = 16;
struct W {
    uint16_t v[WORDS];
};

#define EACH_WORD for (int i = 0; i < WORDS; i++)

inline W load_word_vector(const void* from) { W r; std::memcpy(&r, from, sizeof r); return r; }
inline void store(void* to, W a) { std::memcpy(to, &a, sizeof a); }
inline W splat_word(int value) { W r; EACH_WORD r.v[i] = uint16_t(value); return r; }
inline W add_words(W a, W b) { EACH_WORD a.v[i] = uint16_t(a.v[i] + b.v[i]); return a; }
inline W add_words_saturated(W a, W b) {
    EACH_WORD a.v[i] = uint16_t(a.v[i] + b.v[i] > 65535 ? 65535 : a.v[i] + b.v[i]);
    return a;
}
inline W subtract_words(W a, W b) { EACH_WORD a.v[i] = uint16_t(a.v[i] - b.v[i]); return a; }
inline W multiply_words(W a, W b) { EACH_WORD a.v[i] = uint16_t(uint32_t(a.v[i]) * b.v[i]); return a; }
inline W clamp_words(W a, W low, W high) {
    EACH_WORD {
        const int16_t value = int16_t(a.v[i]), least = int16_t(low.v[i]), most = int16_t(high.v[i]);
        a.v[i] = uint16_t(value < least ? least : value > most ? most : value);
    }
    return a;
}
inline W least_words(W a, W b) { EACH_WORD a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }

// Fills a vector with copies of COUNT words.
template <int COUNT>
inline W repeat_words(const uint16_t* from) {
    W r;
    EACH_WORD r.v[i] = from[i % COUNT];
    return r;
}

// Stores a group of edges, taken out of the lanes' order.
template <int IN_SHIFT>
inline void store_edges(uint16_t* to, const W (&lanes)[2]) {
    for (int i = 0; i < 2 * WORDS; i++) to[exl3::edge_of_lane(IN_SHIFT, i)] = lanes[i / WORDS].v[i % WORDS];
}

#undef EACH_WORD

}  // namespace

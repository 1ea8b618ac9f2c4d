// One step of the encoder's search: for every edge, the cheapest of the states that lead to it.
//
// All 65,536 states are weighed at each of a tile's positions, in 16-bit arithmetic. Which state won
// is not kept: the trace back weighs the few candidates of the edges it passes again.
#pragma once

#include "kernels.h"
#include "repeat.h"

namespace {

using namespace exl3;

template <int IN_SHIFT, bool CLAMP>
void viterbi_step(ViterbiTask& t) {
    constexpr int vectors = ENCODE_GROUP / WORDS;
    constexpr int arriving = IN_SHIFT < 5 ? 32 >> IN_SHIFT : 1;  // edges that a group's states came from
    const int in_edges = t.edges >> IN_SHIFT;                    // and those of all groups, for one entry
    const int16_t* values = t.values;
    const W high = splat_word(t.clamp), low = splat_word(-t.clamp);
    W target[ENCODE_TILES], least[ENCODE_TILES];
    repeat<ENCODE_TILES>([&](auto tile) EXL3_INLINE {
        target[tile] = splat_word(t.target[tile]);
        least[tile] = splat_word(-1);
    });
    for (int edge = 0; edge < t.edges; edge += ENCODE_GROUP) {
        W best[ENCODE_TILES][vectors];
        repeat<vectors>([&](auto i) EXL3_INLINE {
            repeat<ENCODE_TILES>([&](auto tile) EXL3_INLINE { best[tile][i] = splat_word(-1); });
        });
        for (int entry = 0; entry < t.entries; entry++) {
            const int from = entry * in_edges + (edge >> IN_SHIFT);
            W before[ENCODE_TILES];
            repeat<ENCODE_TILES>(
                [&](auto tile) EXL3_INLINE { before[tile] = repeat_words<arriving>(t.from[tile] + from); });
            repeat<vectors>([&](auto i) EXL3_INLINE {
                const W value = load_word_vector(values + i * WORDS);
                repeat<ENCODE_TILES>([&](auto tile) EXL3_INLINE {
                    W difference = subtract_words(value, target[tile]);
                    if constexpr (CLAMP) difference = clamp_words(difference, low, high);
                    const W square = multiply_words(difference, difference);
                    const W cost = CLAMP ? add_words(before[tile], square) : add_words_saturated(before[tile], square);
                    best[tile][i] = least_words(best[tile][i], cost);
                });
            });
            values += ENCODE_GROUP;
        }
        repeat<ENCODE_TILES>([&](auto tile) EXL3_INLINE {
            store_edges<IN_SHIFT>(t.to[tile] + edge, best[tile]);
            repeat<vectors>([&](auto i) EXL3_INLINE { least[tile] = least_words(least[tile], best[tile][i]); });
        });
    }
    for (int tile = 0; tile < ENCODE_TILES; tile++) {
        uint16_t words[WORDS];
        store(words, least[tile]);
        t.least[tile] = words[0];
        for (const uint16_t word : words) t.least[tile] = word < t.least[tile] ? word : t.least[tile];
    }
}

template <bool CLAMP>
void viterbi_rate(ViterbiTask& t) {
    switch (t.in_shift) {
        case 1: return viterbi_step<1, CLAMP>(t);
        case 2: return viterbi_step<2, CLAMP>(t);
        case 3: return viterbi_step<3, CLAMP>(t);
        case 4: return viterbi_step<4, CLAMP>(t);
        case 5: return viterbi_step<5, CLAMP>(t);
        case 6: return viterbi_step<6, CLAMP>(t);
        case 7: return viterbi_step<7, CLAMP>(t);
        default: return viterbi_step<8, CLAMP>(t);
    }
}

void viterbi(ViterbiTask& t) { t.clamp ? viterbi_rate<true>(t) : viterbi_rate<false>(t); }

}  // namespace

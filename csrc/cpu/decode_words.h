// Codebooks for vectors of words: a vector of 16 states to int16 weights.
//
// A hash is the state times 32 bits, whose lower and upper halves are computed as words of their own: so all lanes of
// every instruction work on 16 states, where multiplications of dwords would be twice as many, and slower on x86.
//
// The including file supplies I and the arithmetic of its words, with `fixed_halves`: fp16 halves of a hash as integers.
#pragma once

#include "format.h"

namespace {

struct Hash {
    I low, high;
};

// STATE times a constant, modulo 2^32.
inline Hash multiply_states(I state, uint32_t by) {
    const W lower = splat_word(int(by & 0xffff)), upper = splat_word(int(by >> 16));
    return {multiply_words(state, lower), add_words(multiply_words_high(state, lower), multiply_words(state, upper))};
}

template <int CODEBOOK>
struct Decoder {
    static_assert(CODEBOOK == INST3 || CODEBOOK == MCG, "mul1 has its own form");

    static Hash hash(I state) {
        if (CODEBOOK == MCG) return multiply_states(state, MCG_MULTIPLIER);
        Hash x = multiply_states(state, INST3_MULTIPLIER);
        const W addend = splat_word(int(INST3_ADDEND & 0xffff));
        x.low = add_words(x.low, addend);
        x.high = add_words_and_carry(x.high, int(INST3_ADDEND >> 16), x.low, addend);
        return x;
    }

    template <int J, class Windows, class Bits>
    I pair(const Windows& windows, const Bits& bits) const {
        const Hash x = hash(windows.template pair<J>(bits));
        return halve_words(add_words(fixed_halves(x.low), fixed_halves(x.high)));
    }
};

template <>
struct Decoder<MUL1> {
    template <int J, class Windows, class Bits>
    I pair(const Windows& windows, const Bits& bits) const {
        const Hash x = multiply_states(windows.template pair<J>(bits), MUL1_MULTIPLIER);
        return sum_bytes(x.low, x.high);
    }
};

}  // namespace

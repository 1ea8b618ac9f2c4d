// Codebooks for vectors of words: a vector of 16 states to int16 weights.
//
// A hash is the state times 32 bits, whose lower and upper halves are computed as words of their own: so all lanes of
// every instruction work on 16 states, where multiplications of dwords would be twice as many, and slower on x86.
//
// The including file supplies I and the arithmetic of its words.
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
        // -1 where the sum did not wrap, which takes back the carry that the constant has.
        const W kept = at_least(x.low, addend);
        x.high = add_words(add_words(x.high, splat_word(int((INST3_ADDEND >> 16) + 1))), kept);
        return x;
    }

    // fp16 numbers as integers in units of 2^-13: mantissa with its leading one, times 2^e, signed.
    static I fixed(I x) {
        // The format ignores bits 12 to 14. With bit 12 set, the sign's operand is never zero, and the exponent's index
        // never one of the zeros here, which is what the upper bytes of the indices ask for.
        alignas(16) static constexpr uint8_t by_exponent[16] = {0, 0, 0, 0, 4, 8, 1, 2, 0, 0, 0, 0, 4, 8, 1, 2};
        const W signs = either(x, splat_word(0x1000));
        const W factor = look_up(by_exponent, shift_words_right<10>(signs));
        const W mantissa = differ(both(x, splat_word(0x03ff)), splat_word(0x0760));
        return with_sign_of(multiply_words(mantissa, factor), signs);
    }

    template <int J, class Windows, class Bits>
    I pair(const Windows& windows, const Bits& bits) const {
        const Hash x = hash(windows.template pair<J>(bits));
        return halve_words(add_words(fixed(x.low), fixed(x.high)));
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

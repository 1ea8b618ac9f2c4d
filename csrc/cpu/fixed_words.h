// The fp16 halves of a hash as integers, where bytes are looked up and words take a sign.
#pragma once

namespace {

// Words as fp16 numbers in units of 2^-13: mantissa with its leading one, times 2^e, signed.
inline W fixed_halves(W x) {
    // The format ignores bits 12 to 14. With bit 12 set, the sign's operand is never zero, and the exponent's index never
    // one of the zeros here, which is what the upper bytes of the indices ask for.
    alignas(16) static constexpr uint8_t by_exponent[16] = {0, 0, 0, 0, 4, 8, 1, 2, 0, 0, 0, 0, 4, 8, 1, 2};
    const W signs = either(x, splat_word(0x1000));
    const W factor = look_up(by_exponent, shift_words_right<10>(signs));
    const W mantissa = differ(both(x, splat_word(0x03ff)), splat_word(0x0760));
    return with_sign_of(multiply_words(mantissa, factor), signs);
}

// high + constant, and one where SUM, which ADDEND was added to, wrapped.
inline W add_words_and_carry(W high, int constant, W sum, W addend) {
    // `at_least` is -1 where it did not.
    return add_words(add_words(high, splat_word(constant + 1)), at_least(sum, addend));
}

}  // namespace

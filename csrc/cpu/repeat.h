// Loops that are unrolled while they are compiled, with the index as a constant.
//
// GCC decides whether an array lives in registers before it unrolls ordinary loops, so the
// accumulators of a kernel must never be indexed by a variable.
#pragma once

#include <utility>

namespace {

#define EXL3_INLINE __attribute__((always_inline))

template <class Function, int... INDEX>
EXL3_INLINE inline void repeat_each(Function&& function, std::integer_sequence<int, INDEX...>) {
    (function(std::integral_constant<int, INDEX>{}), ...);
}

template <int COUNT, class Function>
EXL3_INLINE inline void repeat(Function&& function) {
    repeat_each(function, std::make_integer_sequence<int, COUNT>{});
}

// A number of turns that the compiler knows nothing about. Around a loop that it knows to run at
// least once, GCC 12 stores all accumulators at every turn.
EXL3_INLINE inline int opaque(int turns) {
    asm("" : "+r"(turns));
    return turns;
}

// A type as a value, to be handed to a generic lambda.
template <class T>
struct Kind {
    using Type = T;
};

}  // namespace

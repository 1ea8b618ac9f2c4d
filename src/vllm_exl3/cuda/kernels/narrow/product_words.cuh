// Product words of the positions that one product multiplies. Where K does not divide 8, shifts that cut states out of their words are
// spread over two pipes: what a funnel shift and a mask would do on one, a multiplication by a power of two and a shift do as well.
#pragma once
#include "base/codebook.cuh"
#include "narrow/arguments.cuh"
#include "base/window.cuh"

// 2^i; in constant memory, so that the compiler does not make shifts of the multiplications again.
__constant__ u32 POWERS[17] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536};

// The states of positions FIRST .. FIRST + COUNT - 1, of which `string` starts with the first and holds all.
template <int HALF_BITS, int FIRST, int P>
__device__ __forceinline__ u32 state_in(u32 string) {
    constexpr int offset = Window<HALF_BITS>::start(P) - Window<HALF_BITS>::start(FIRST);
    static_assert(offset >= 0 && offset <= 16, "the string holds the state");
    if constexpr (offset == 0) return string >> 16;
    else if constexpr (offset == 16) return string & 0xffffu;
    else return multiply_add(string, POWERS[offset], 0) >> 16;
}

// True where permutes of bytes cut states out; else shifts that are spread over two pipes. Where K does not divide 8 permutes are fewer
// instructions, but more on one pipe, which K = 3 and other codebooks' masks have no room for; as measured.
template <class K>
constexpr bool PERMUTES =
    K::Window::byte_aligned || (K::Window::twice && K::codebook == MUL1 && (K::half_bits > 6 || K::arithmetic == HALF));

// The states of the eight positions from 8·I on; in both halves of their words where they are permuted.
template <class K, int I>
__device__ __forceinline__ void eight_states(u32 (&x)[8], const u32 (&words)[K::Window::words]) {
    using W = typename K::Window;
    constexpr int p = 8 * I, HALF_BITS = K::half_bits;
    if constexpr (PERMUTES<K>) {
        x[0] = W::template get<p>(words), x[1] = W::template get<p + 1>(words), x[2] = W::template get<p + 2>(words);
        x[3] = W::template get<p + 3>(words), x[4] = W::template get<p + 4>(words), x[5] = W::template get<p + 5>(words);
        x[6] = W::template get<p + 6>(words), x[7] = W::template get<p + 7>(words);
    } else if constexpr (W::start(p + 3) - W::start(p) <= 16 && W::start(p + 7) - W::start(p + 4) <= 16) {
        const u32 s = W::template string_at<W::start(p)>(words), t = W::template string_at<W::start(p + 4)>(words);
        x[0] = state_in<HALF_BITS, p, p>(s), x[1] = state_in<HALF_BITS, p, p + 1>(s);
        x[2] = state_in<HALF_BITS, p, p + 2>(s), x[3] = state_in<HALF_BITS, p, p + 3>(s);
        x[4] = state_in<HALF_BITS, p + 4, p + 4>(t), x[5] = state_in<HALF_BITS, p + 4, p + 5>(t);
        x[6] = state_in<HALF_BITS, p + 4, p + 6>(t), x[7] = state_in<HALF_BITS, p + 4, p + 7>(t);
    } else {
        const u32 s = W::template string_at<W::start(p)>(words), t = W::template string_at<W::start(p + 2)>(words);
        const u32 u = W::template string_at<W::start(p + 4)>(words), v = W::template string_at<W::start(p + 6)>(words);
        x[0] = state_in<HALF_BITS, p, p>(s), x[1] = state_in<HALF_BITS, p, p + 1>(s);
        x[2] = state_in<HALF_BITS, p + 2, p + 2>(t), x[3] = state_in<HALF_BITS, p + 2, p + 3>(t);
        x[4] = state_in<HALF_BITS, p + 4, p + 4>(u), x[5] = state_in<HALF_BITS, p + 4, p + 5>(u);
        x[6] = state_in<HALF_BITS, p + 6, p + 6>(v), x[7] = state_in<HALF_BITS, p + 6, p + 7>(v);
    }
}

// Product words of two states that lie 16 bits apart, in one string of 32: the lower one's is the string's less the upper one's,
// which is a multiplication where cutting it out would be an instruction of the pipe that has the masks to do.
template <int CODEBOOK>
__device__ __forceinline__ void two_words(u32& upper, u32& lower, u32 string) {
    static_assert(CODEBOOK != MUL1, "mul1 has no masks, and loses by it");
    constexpr u32 multiplier = CODEBOOK == MCG ? MCG_MULTIPLIER : INST3_MULTIPLIER, addend = CODEBOOK == MCG ? 0 : INST3_ADDEND;
    const u32 x = multiply_add(string >> 16, multiplier, addend);
    lower = halves_of(multiply_add(x, 0xffff0000u, multiply_add(string, multiplier, addend + (addend << 16))));
    upper = halves_of(x);
}

// Product words of the eight positions from 8·I on.
template <class K, int I>
__device__ __forceinline__ void eight_words(u32 (&x)[8], const u32 (&words)[K::Window::words]) {
    using W = typename K::Window;
    constexpr int p = 8 * I, C = K::codebook;
    if constexpr (C != MUL1 && K::half_bits == 8) {
        two_words<C>(x[0], x[4], W::template string_at<W::start(p)>(words));
        two_words<C>(x[1], x[5], W::template string_at<W::start(p + 1)>(words));
        two_words<C>(x[2], x[6], W::template string_at<W::start(p + 2)>(words));
        two_words<C>(x[3], x[7], W::template string_at<W::start(p + 3)>(words));
    } else {
        eight_states<K, I>(x, words);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = product_word<C, PERMUTES<K>>(x[i]);
    }
}

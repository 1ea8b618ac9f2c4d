// Window extraction: the 16-bit trellis states of 32 consecutive ring positions, from the words that hold them.
//
// A lane owns ring positions 32c..32c+31 of one tile, the 16 k of output channels c and c+8. `load_words` leaves
// in registers a bit string, most significant bit first, in which the state of position p starts at bit `start(p)`;
// `get<p>` cuts it out. Which bits, is known at compile time, so each state costs one or two instructions:
//   K = 1, 2, 3, 4, 6, 8: many states of equal start mod 8 lie few bytes apart: a funnel shift a word serves them all, each
//                         then one byte permute, which leaves the state in both halves of its word (base/codebook.cuh undoes it);
//   other K:              a shift or funnel shift, and a mask where the state is not at an end of its word.
#pragma once
#include "base/types.cuh"

template <int HALF_BITS>
struct Window {
    static constexpr bool whole = HALF_BITS % 2 == 0;
    static constexpr int words = HALF_BITS / 2 + 1;  // words of the bit string, the 16 bits before it included
    static constexpr int tile_words = 4 * HALF_BITS;

    // Bits that positions 0..p take: K each, or floor(K) for even and floor(K)+1 for odd ones.
    static constexpr int consumed(int p) { return (HALF_BITS * (p + 1)) / 2; }
    // A whole-K string starts one word before the lane's own; a half-K string starts at the first state itself.
    static constexpr int start(int p) { return consumed(p) + (whole ? 16 : 0); }
    static constexpr bool byte_aligned = HALF_BITS == 2 || HALF_BITS == 4 || HALF_BITS == 8 || HALF_BITS == 16;
    // True where `get` gives a state in both halves of a word: a byte permute can do that wherever its two bytes are, also in two words,
    // while clearing the upper half would leave no room for a second word.
    static constexpr bool twice = byte_aligned || HALF_BITS == 6 || HALF_BITS == 12;

    template <int BIT>
    static __device__ __forceinline__ u32 string_at(const u32 (&w)[words]) {  // 32 bits from bit BIT on
        constexpr int index = BIT / 32, offset = BIT % 32, next = index + 1 < words ? index + 1 : index;
        if constexpr (offset == 0) return w[index];
        else return __funnelshift_l(w[next], w[index], offset);
    }

    // Two bytes from byte BYTE of `word` on, counted from the top, the second perhaps the next word's first; in both halves.
    template <int BYTE>
    static __device__ __forceinline__ u32 two_bytes_twice(u32 word, u32 next) {
        constexpr u32 half = (3 - BYTE) << 4 | (BYTE < 3 ? 2 - BYTE : 7);
        return __byte_perm(word, next, half << 8 | half);
    }

    template <int P>
    static __device__ __forceinline__ u32 get(const u32 (&w)[words]) {
        constexpr int bit = start(P), index = bit / 32, offset = bit % 32;
        if constexpr (twice) {
            constexpr int byte = offset / 8, from = bit - 8 * byte;
            if constexpr (byte < 3) return two_bytes_twice<byte>(string_at<from>(w), 0);
            else return two_bytes_twice<byte>(string_at<from>(w), string_at<from + 32>(w));
        } else if constexpr (offset == 0) {
            return w[index] >> 16;
        } else if constexpr (offset <= 16) {
            return (w[index] >> (16 - offset)) & 0xffffu;
        } else {
            return __funnelshift_r(w[index + 1], w[index], 48 - offset) & 0xffffu;
        }
    }
};

// Reads the lane's words of one tile. `read(i)` gives word i of the tile (shared or global memory), `c` = lane >> 2.
// Whole K: the word before the lane's own is the last word of the lane that owns the positions before: lane - 4,
// modulo the warp, which is also what makes the ring bite its tail.
template <int HALF_BITS, class Vector>
__device__ __forceinline__ void load_words(u32 (&w)[Window<HALF_BITS>::words], const Vector& read, int lane) {
    using W = Window<HALF_BITS>;
    const int c = lane >> 2;
    if constexpr (W::whole) {
        constexpr int own = HALF_BITS / 2;
        u32 words[own];
        read.template run<own>(words, own * c);
#pragma unroll
        for (int i = 0; i < own; ++i) w[i + 1] = words[i];
        w[0] = __shfl_sync(0xffffffffu, words[own - 1], (lane - 4) & 31);
    } else {
        // Odd c starts on a word, even c in the middle of the word before: aligned here by a shift of 0 or 16.
        const int before = (HALF_BITS * c - 1) >> 1;  // floor(K·c - 1/2), -1 for c = 0: the ring's last word
        u32 raw[W::words + 1];
        raw[0] = read.one(before < 0 ? W::tile_words - 1 : before);
#pragma unroll
        for (int i = 1; i <= W::words; ++i) raw[i] = read.one(before + i < W::tile_words ? before + i : 0);
        const u32 shift = c & 1 ? 0 : 16;
#pragma unroll
        for (int i = 0; i < W::words; ++i) w[i] = __funnelshift_l(raw[i + 1], raw[i], shift);
    }
}

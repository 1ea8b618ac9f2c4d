// The GEMM's B operand as shared memory holds it: a record a k block, a token's part after the other.
//
// A k block's activations of one token are H(x·suh)/sqrt(128) with a scale of their own, so rotating needs no other channels:
//   INTEGER:    a15 = round(A·16256/max|A|), stored as 128·high + low, both in int8, two planes a token;
//   BYTE:       a8 = round(A·127/max|A|);
//   PAIR, HALF: fp16 of A·2^e with 2^10 <= max|A|·2^e < 2^11.
// What decoding leaves out of a weight (base/codebook.cuh) is added back through the initial value of the k block's sums, or after them.
#pragma once
#include "base/fragments.cuh"
#include "narrow/arguments.cuh"

constexpr float MUL1_OFFSET = -905216.0f / 1774.0f;  // w = MUL1_SCALE·(B + MUL1_OFFSET), B the sum of four bytes

// A token's part: words [half of k][quad][plane][k-tile][4] of operands, of which a lane reads the quads of its (plane, k-tile);
// then where its sums begin, and the factor that undoes its scale. Only tokens that exist have one, unless a record holds several
// groups of columns; lanes of others read the last one's, and what comes of it ends in columns that nobody reads.
template <int ARITHMETIC, int TILE_ROWS, bool = WARPGROUPS && ARITHMETIC == HALF>
struct Record {
    static constexpr u32 group = ARITHMETIC == INTEGER ? 4 : 8;  // tokens of a group of 8 columns
    static constexpr u32 planes = ARITHMETIC == INTEGER ? 2 : 1, quads = ARITHMETIC == HALF ? 2 : 4;
    static constexpr u32 quad_bytes = planes * 64, k_half_bytes = quads * quad_bytes;
    static constexpr u32 start_at = 2 * k_half_bytes, descale_at = start_at + (ARITHMETIC == INTEGER ? 16 : 4);
    // The eight lanes that read 16 bytes at once hit different banks.
    static constexpr u32 token_bytes = 2 * k_half_bytes + (ARITHMETIC == INTEGER ? 32 : 64);
    static constexpr u32 bytes = (TILE_ROWS < group ? group : TILE_ROWS) * token_bytes;  // at most
};

// The same for wgmma: 8×8 matrices of 16-byte rows as its descriptors want them, [half of k][product][half of its 16 k][token], one word a
// k-tile; then every token's factor, and what is added to its sums after that.
template <int ARITHMETIC, int TILE_ROWS>
struct Record<ARITHMETIC, TILE_ROWS, true> {
    static constexpr u32 tokens = TILE_ROWS;
    static constexpr u32 matrix_pitch = 16 * tokens + 16, k_half_bytes = 8 * matrix_pitch + 32;  // no bank conflicts when written
    static constexpr u32 descale_at = 2 * k_half_bytes, bytes = descale_at + 8 * tokens;
};

struct Scale {
    float factor;  // from unscaled H(x·suh) to what is multiplied
    float descale;    // from the products' sum to y before the output Hadamard
};

__device__ __forceinline__ Scale scale_of(u32 arithmetic, float largest) {
    if (arithmetic == INTEGER || arithmetic == BYTE) {
        const float most = arithmetic == INTEGER ? LARGEST_INTEGER : LARGEST_BYTE, factor = most / largest;
        if (!(factor <= 3.0e38f) && largest <= 1.0f) return {0.0f, 0.0f};  // zeros, or below 2^-113
        return {factor, largest * (HADAMARD_SCALE * MUL1_SCALE / most)};  // infinity and NaN: 0·undo is NaN
    }
    // 2^exponent <= largest·HADAMARD_SCALE, as float bits; the factor is 2^(10-exponent) and stays a normal number.
    const u32 exponent = __float_as_uint(largest * HADAMARD_SCALE) >> 23 & 0xffu;
    const u32 up = min(264u - max(exponent, 11u), 253u);
    const float descale = __uint_as_float((254u - up) << 23);
    return {__uint_as_float(up << 23) * HADAMARD_SCALE, largest <= 3.0e38f ? descale : largest * 1.0e30f};
}

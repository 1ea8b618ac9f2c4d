// The product words of a tile's states as the decode path of routed experts makes them, of every rate and codebook.
#include "ptx.h"
#include "moe/products.cuh"

// The bit string of ring positions from 32·c on, of which Window cuts states.
template <int HALF_BITS>
void read_string(u32 (&words)[Window<HALF_BITS>::words], const u32* tile, int c) {
    using W = Window<HALF_BITS>;
    if constexpr (W::whole) {
        for (int i = 0; i < W::words; ++i) words[i] = tile[(HALF_BITS / 2 * c + i - 1 + W::tile_words) % W::tile_words];
    } else {
        const int before = (HALF_BITS * c - 1) >> 1;
        const auto at = [&](int i) { return tile[(before + i + W::tile_words) % W::tile_words]; };
        for (int i = 0; i < W::words; ++i) words[i] = __funnelshift_l(at(i + 1), at(i), c & 1 ? 0 : 16);
    }
}

template <class K, int P>
void write_words(u32* out, const u32 (&words)[K::Window::words]) {
    if constexpr (P < 32) {
        out[P] = operand_at<K, P>(words);
        write_words<K, P + 1>(out, words);
    }
}

template <int HALF_BITS, int CODEBOOK>
bool run(int half_bits, int codebook, const u32* tile, u32* out) {
    if (half_bits != HALF_BITS || codebook != CODEBOOK) return false;
    for (int c = 0; c < 8; ++c) {
        u32 words[Window<HALF_BITS>::words];
        read_string<HALF_BITS>(words, tile, c);
        write_words<Kind<HALF_BITS, CODEBOOK, CODEBOOK == MUL1 ? INTEGER : PAIR, 4>, 0>(out + 32 * c, words);
    }
    return true;
}

template <int... HALF_BITS>
bool run_any(int half_bits, int codebook, const u32* tile, u32* out) {
    return ((run<HALF_BITS, INST3>(half_bits, codebook, tile, out) || run<HALF_BITS, MCG>(half_bits, codebook, tile, out) ||
             run<HALF_BITS, MUL1>(half_bits, codebook, tile, out)) || ...);
}

// A tile of 4·half_bits words to 256 product words; false where nothing is known of such a one.
extern "C" bool product_words(int half_bits, int codebook, const u32* tile, u32* out) {
    return run_any<2, 4, 6, 8, 10, 12, 14, 16>(half_bits, codebook, tile, out) || run<3, MUL1>(half_bits, codebook, tile, out) ||
        run<5, MUL1>(half_bits, codebook, tile, out) || run<7, MUL1>(half_bits, codebook, tile, out);
}

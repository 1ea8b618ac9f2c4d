// Runs the device code of base/window.cuh on the host: the intrinsics it uses, and a program that prints every state.
// Reads tiles of 4·HALF_BITS words from stdin, writes 256 states a tile, 16 bits each, to stdout.
#include <cstdint>
#include <cstdio>
#define __device__
#define __forceinline__ inline
typedef uint32_t u32;
static const u32* ring;  // the tile that is being read, for the shuffle below
static int own_words;

static u32 __funnelshift_l(u32 low, u32 high, u32 shift) {
    return u32((((uint64_t(high) << 32) | low) << (shift & 31)) >> 32);
}
static u32 __funnelshift_r(u32 low, u32 high, u32 shift) { return u32(((uint64_t(high) << 32) | low) >> (shift & 31)); }
static u32 __byte_perm(u32 low, u32 high, u32 selector) {
    const uint64_t bytes = (uint64_t(high) << 32) | low;
    u32 result = 0;
    for (int i = 0; i < 4; ++i) result |= u32((bytes >> (8 * (selector >> (4 * i) & 7))) & 255) << (8 * i);
    return result;
}
// The only shuffle asks a lane for the last word that it owns.
static u32 __shfl_sync(u32, u32, int lane) { return ring[own_words * (lane >> 2) + own_words - 1]; }

#include "base/window.cuh"

struct HostWords {
    u32 one(int index) const { return ring[index]; }
    template <int COUNT>
    void run(u32 (&words)[COUNT], int first) const {
        for (int i = 0; i < COUNT; ++i) words[i] = ring[first + i];
    }
};

template <int P>
void states(uint16_t* out, const u32 (&words)[Window<HALF_BITS_UNDER_TEST>::words]) {
    if constexpr (P < 32) {
        using W = Window<HALF_BITS_UNDER_TEST>;
        const u32 state = W::template get<P>(words);
        out[P] = state >> 16 == (W::twice ? state & 0xffff : 0) ? uint16_t(state) : 0xdead;
        states<P + 1>(out, words);
    }
}

int main() {
    u32 tile[4 * HALF_BITS_UNDER_TEST];
    own_words = HALF_BITS_UNDER_TEST / 2;
    ring = tile;
    while (fread(tile, 4, 4 * HALF_BITS_UNDER_TEST, stdin) == 4 * HALF_BITS_UNDER_TEST)
        for (int c = 0; c < 8; ++c) {
            u32 words[Window<HALF_BITS_UNDER_TEST>::words];
            uint16_t out[32];
            load_words<HALF_BITS_UNDER_TEST>(words, HostWords{}, 4 * c);
            states<0>(out, words);
            fwrite(out, 2, 32, stdout);
        }
}

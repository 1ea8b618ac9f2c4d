// The row codec on one warp: a ring of WIDTH symbols of BITS bits, lowest bit first, to consecutive values of each lane.
//
// A ring is 1 + WIDTH·BITS/16 16-bit words, the scale first, at any even address. Every word is read once, two at a time:
// a ring in host memory costs one request a lane. State i is made of symbols i, i-1, …, the newest lowest.
#pragma once
#include "base/codebook.cuh"

template <int WIDTH, int BITS>
struct Ring {
    static constexpr int words = 1 + WIDTH * BITS / 16;
    static constexpr int staged = words / 2 + 4;  // u32 that a warp's staging takes: one for the odd address, the others are read past
    static constexpr int values = WIDTH / 32;     // of a lane
    static constexpr int back = (16 + BITS - 1) / BITS - 1;  // symbols before its own that a state reaches back to
};

// Brings a ring to shared memory, the ring's last word in the scale's place: states at the ring's start reach back to it.
// Returns the scale; `odd` says by how many 16-bit words the ring is shifted in `staged`. `end` is the table's.
template <int WIDTH, int BITS>
__device__ __forceinline__ float stage_ring(const u16* ring, const u16* end, u32* staged, int lane, int& odd) {
    constexpr int words = Ring<WIDTH, BITS>::words;
    odd = int(reinterpret_cast<u64>(ring) >> 1 & 1);
    const u16* first = ring - odd;
    for (int i = lane; 2 * i < words + odd; i += 32) {
        const u16* pair = first + 2 * i;
        staged[i] = pair + 1 < end ? __ldg(reinterpret_cast<const u32*>(pair)) : u32(__ldg(pair));
    }
    __syncwarp();
    u16* halves = reinterpret_cast<u16*>(staged) + odd;
    const u16 scale = halves[0], last = halves[words - 1];
    __syncwarp();
    if (lane == 0) halves[0] = last;
    __syncwarp();
    return half_to_float(scale);
}

// The `COUNT` values from `first` on: mul1(state)·scale, exact in fp32.
template <int WIDTH, int BITS, int COUNT>
__device__ __forceinline__ void decode_ring(float (&values)[COUNT], const u32* staged, int odd, float scale, int first) {
    constexpr int back = Ring<WIDTH, BITS>::back, count = COUNT + (COUNT & 1), words = ((back + count) * BITS + 31) / 32;
    const int at = 16 * (1 + odd) + (first - back) * BITS;  // bit of the oldest symbol in `staged`, never negative
    u32 raw[words + 1], window[words + 1];
#pragma unroll
    for (int i = 0; i <= words; ++i) raw[i] = staged[(at >> 5) + i];
#pragma unroll
    for (int i = 0; i < words; ++i) window[i] = __funnelshift_r(raw[i], raw[i + 1], at & 31);
    window[words] = 0;
    u32 state = 0, states[count];
#pragma unroll
    for (int i = 0; i < back + count; ++i) {
        const int bit = i * BITS, word = bit / 32;
        const u32 symbol = __funnelshift_r(window[word], window[word + 1], bit % 32) & ((1u << BITS) - 1);
        state = state << BITS | symbol;
        if (i >= back) states[i - back] = state & 0xffffu;
    }
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
        const u32 weights = decode_pair<MUL1>(states[i], states[i + 1]);
        values[i] = half_to_float(u16(weights)) * scale;
        if (i + 1 < COUNT) values[i + 1] = half_to_float(u16(weights >> 16)) * scale;
    }
}

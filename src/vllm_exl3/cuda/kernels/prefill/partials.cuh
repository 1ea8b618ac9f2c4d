// Partial sums of split tiles: how a thread packs them, eight at a time, and how they are added up.
#pragma once
#include "wide/arguments.cuh"

__device__ __forceinline__ u32 packed_halves(float low, float high) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// fp16 of sums in fp32, scaled to fit: half the bytes. Activations are below 2^11, and below 2^4 where room is left for
// outliers, so a larger divisor loses small rows. A row of activations is 181·sqrt(k) long at most, a column of weights
// about 1.24·sqrt(k), which bounds sums by 224·k.
struct HalfPartials {
    using Sum = float;
    static constexpr u32 VECTORS = 1;  // of eight sums
    static constexpr float STORED_SCALE = 1.0f / 256;

    static __device__ __forceinline__ void pack(uint4 (&split)[VECTORS], const float* sums) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = packed_halves(sums[2 * i] * STORED_SCALE, sums[2 * i + 1] * STORED_SCALE);
        split[0] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    static __device__ __forceinline__ void add(float* sums, const uint4 (&split)[VECTORS]) {
        const u32 words[4] = {split[0].x, split[0].y, split[0].z, split[0].w};
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i] += half_to_float(u16(words[i / 2] >> 16 * (i & 1)));
    }
    static __device__ __forceinline__ float whole(float sum) { return sum * (1.0f / STORED_SCALE); }
};

// Sums of int8 products as they are: a tile that was split then has the bits of one that was not, which passes through fp16
// as a whole, a 4096th of its sums.
struct IntPartials {
    using Sum = int;
    static constexpr u32 VECTORS = 2;
    static constexpr float STORED_SCALE = 1.0f / 4096;

    static __device__ __forceinline__ void pack(uint4 (&split)[VECTORS], const int* sums) {
#pragma unroll
        for (int i = 0; i < 2; ++i) split[i] = make_uint4(u32(sums[4 * i]), u32(sums[4 * i + 1]), u32(sums[4 * i + 2]), u32(sums[4 * i + 3]));
    }
    static __device__ __forceinline__ void add(int* sums, const uint4 (&split)[VECTORS]) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            sums[4 * i] += int(split[i].x), sums[4 * i + 1] += int(split[i].y), sums[4 * i + 2] += int(split[i].z), sums[4 * i + 3] += int(split[i].w);
    }
    // A sum of all parts as the end of a whole tile has it.
    static __device__ __forceinline__ float whole(int sum) {
        return half_to_float(u16(packed_halves(static_cast<float>(sum) * STORED_SCALE, 0.0f))) * (1.0f / STORED_SCALE);
    }
};

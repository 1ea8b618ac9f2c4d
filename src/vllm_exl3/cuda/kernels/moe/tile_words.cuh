// One tile's trellis words on their way from global memory to the window extraction, without shared memory between.
#pragma once
#include "base/window.cuh"

template <int HALF_BITS>
struct TileWords {
    using W = Window<HALF_BITS>;
    // Whole K: the lane's own words. Half K: those from the word before its first state on (base/window.cuh).
    static constexpr int count = W::whole ? HALF_BITS / 2 : W::words + 1;
    u32 v[count];

    // Where the lane's words begin in a tile.
    static __device__ __forceinline__ int first(int lane) { return W::whole ? count * (lane >> 2) : 0; }

    // `own`: a tile's words, from the lane's first on.
    __device__ __forceinline__ void fetch(const u32* own, int lane) {
        if constexpr (W::whole) {
            if constexpr (count % 4 == 0) {
#pragma unroll
                for (int i = 0; i < count; i += 4)
                    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[i]), "=r"(v[i + 1]),
                                 "=r"(v[i + 2]), "=r"(v[i + 3]) : "l"(own + i));
            } else if constexpr (count % 2 == 0) {
#pragma unroll
                for (int i = 0; i < count; i += 2)
                    asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v[i]), "=r"(v[i + 1]) : "l"(own + i));
            } else {
#pragma unroll
                for (int i = 0; i < count; ++i) v[i] = one(own + i);
            }
        } else {
            const int before = (HALF_BITS * (lane >> 2) - 1) >> 1;
            v[0] = one(own + (before < 0 ? W::tile_words - 1 : before));
#pragma unroll
            for (int i = 1; i < count; ++i) v[i] = one(own + (before + i < W::tile_words ? before + i : 0));
        }
    }

    // The bit string that Window<HALF_BITS>::get cuts.
    __device__ __forceinline__ void string(u32 (&w)[W::words], int lane) const {
        if constexpr (W::whole) {
#pragma unroll
            for (int i = 0; i < count; ++i) w[i + 1] = v[i];
            w[0] = __shfl_sync(0xffffffffu, v[count - 1], (lane - 4) & 31);
        } else {
            const u32 shift = lane >> 2 & 1 ? 0 : 16;
#pragma unroll
            for (int i = 0; i < W::words; ++i) w[i] = __funnelshift_l(v[i + 1], v[i], shift);
        }
    }

private:
    static __device__ __forceinline__ u32 one(const u32* word) {
        u32 value;
        asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value) : "l"(word));
        return value;
    }
};

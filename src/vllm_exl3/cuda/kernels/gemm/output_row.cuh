// A row of an n tile's Hadamard block in the registers of half a warp: the output Hadamard, scale, svh, and stores.
#pragma once
#include "base/hadamard.cuh"
#include "prefill/arguments.cuh"

// A lane's eight channels of a row, 4·i .. 4·i+3 and the same behind channel 64: half a warp has a row, and a warp two.
struct RowOfLane {
    u32 row, channel;

    __device__ __forceinline__ explicit RowOfLane(int lane) : row(lane / 16), channel(4 * (lane % 16)) {}

    __device__ __forceinline__ void add(float (&v)[8], const float* from) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float4 values = *reinterpret_cast<const float4*>(from + channel + 64 * half);
            v[4 * half] += values.x, v[4 * half + 1] += values.y, v[4 * half + 2] += values.z, v[4 * half + 3] += values.w;
        }
    }
    // The transform, but for the step of channel bit 3.
    __device__ __forceinline__ static void rotate(float (&v)[8], int lane) {
        butterflies<1>(v);
#pragma unroll
        for (u32 step = 1; step < 16; step *= 2) {
            if (step == 2) continue;
            const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xffffffffu, v[i], step));
        }
    }
    // `descale` may be as large as an activation: it comes last, so that nothing overflows before.
    __device__ __forceinline__ void scale(float (&v)[8], float factor, float descale, const u16* svh) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint2 raw = *reinterpret_cast<const uint2*>(svh + channel + 64 * half);
            const u32 words[2] = {raw.x, raw.y};
#pragma unroll
            for (int i = 0; i < 4; ++i) v[4 * half + i] = v[4 * half + i] * factor * half_to_float(u16(words[i / 2] >> 16 * (i & 1))) * descale;
        }
    }
    __device__ __forceinline__ void store_shared_row(const float (&v)[8], float* to) const {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<float4*>(to + channel + 64 * half) = make_float4(v[4 * half], v[4 * half + 1], v[4 * half + 2], v[4 * half + 3]);
    }
    // To a row of the output that begins at `first`, which is aligned.
    __device__ __forceinline__ void store(const float (&v)[8], const PrefillArgs& args, i64 first) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* d = v + 4 * half;
            const i64 at = first + channel + 64 * half;
            if (args.out_type == F32) {
                *reinterpret_cast<float4*>(static_cast<float*>(args.out) + at) = make_float4(d[0], d[1], d[2], d[3]);
                continue;
            }
            u32 words[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if (args.out_type == F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[j]) : "f"(d[2 * j + 1]), "f"(d[2 * j]));
                else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[j]) : "f"(d[2 * j + 1]), "f"(d[2 * j]));
            }
            *reinterpret_cast<uint2*>(static_cast<u16*>(args.out) + at) = make_uint2(words[0], words[1]);
        }
    }
};

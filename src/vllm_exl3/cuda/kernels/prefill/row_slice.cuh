// The input side of prefill, a lane's part: 64 consecutive channels of one row, a k block, which is what lies together in the
// result. Its neighbour has the other half of their 128-block: one step of the transform crosses lanes.
#pragma once
#include "base/cp_async.cuh"
#include "base/hadamard.cuh"
#include "prefill/arguments.cuh"

constexpr u32 BLOCK_K_PITCH = 2 * BLOCK_K + 16;  // bytes of a row's k block in shared memory, padded against bank conflicts

__device__ __forceinline__ bool loads_vectors(const PrefillArgs& args) {
    return args.x_type != F32 && (args.in_width | args.x_stride) % 8 == 0 && reinterpret_cast<u64>(args.x) % 16 == 0;
}
// Eight stored channels of 16 bits.
__device__ __forceinline__ void unpack(float (&v)[8], const uint4& raw, u32 type) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[2 * i] = type == F16 ? half_to_float(u16(words[i])) : __uint_as_float(words[i] << 16);
        v[2 * i + 1] = type == F16 ? half_to_float(u16(words[i] >> 16)) : __uint_as_float(words[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ u32 row_pitch(const PrefillArgs& args) {
    return args.in_features / BLOCK_K * BLOCK_K_PITCH / 128 * 128 + 128 + (args.block_rows == 2 ? 64 : 32);
}

// The largest magnitude; a NaN is above all, so that its row comes out as NaN and not as something plausible.
__device__ __forceinline__ float larger(float most, float value) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(most), "f"(fabsf(value)));
    return result;
}

// A thread's part of the rotation: k block `k_block` of the row `row`, which is the block's row `in_block`.
struct RowSlice {
    u32 row, in_block, k_block;
    bool exists;

    __device__ __forceinline__ RowSlice(const PrefillArgs& args, u32 index) {
        const u32 pair = index >> 1;
        in_block = pair % args.block_rows, row = blockIdx.x * args.block_rows + in_block;
        k_block = 2 * (pair / args.block_rows) + (index & 1);
        exists = row < args.rows && k_block < args.in_features / BLOCK_K;
    }
    // x·suh. `in_shared`: the block's rows are in shared memory.
    __device__ __forceinline__ void load(float (&v)[BLOCK_K], const PrefillArgs& args, const u8* rows, const u16* suh, bool in_shared) const {
        if (!exists) {
#pragma unroll
            for (int i = 0; i < int(BLOCK_K); ++i) v[i] = 0.0f;
            return;
        }
        const uint4* scales = reinterpret_cast<const uint4*>(suh + k_block * BLOCK_K);
        if (in_shared) {
            const uint4* raw = reinterpret_cast<const uint4*>(rows + in_block * row_pitch(args) + k_block * BLOCK_K_PITCH);
#pragma unroll
            for (int i = 0; i < int(BLOCK_K) / 8; ++i) unpack(reinterpret_cast<float(&)[8]>(v[8 * i]), raw[i], args.x_type);
        } else {
#pragma unroll
            for (int i = 0; i < int(BLOCK_K); ++i) {
                const u32 column = k_block * BLOCK_K + i;
                v[i] = column < args.in_width ? load_element(args.x, row * args.x_stride + column, args.x_type) : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < int(BLOCK_K) / 8; ++i) {
            float factors[8];
            unpack(factors, scales[i], F16);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[8 * i + j] *= factors[j];
        }
    }
    // H over the 128-block; unscaled.
    __device__ __forceinline__ void rotate(float (&v)[BLOCK_K]) const {
        butterflies<1>(v);
        const float sign = k_block & 1 ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < int(BLOCK_K); ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xffffffffu, v[i], 1));
    }
};

// Starts to bring a shard's suh to shared memory.
__device__ __forceinline__ void load_suh_to_shared(const PrefillArgs& args, u32 shard, u8* suh) {
    const u16* from = args.shards[shard].suh;
    for (u32 i = threadIdx.x; i < args.in_features / 8; i += blockDim.x)
        cp_async_16(shared_address(suh + i / 8 * BLOCK_K_PITCH + i % 8 * 16), from + 8 * i);
}

// Starts to bring the block's rows to shared memory.
__device__ __forceinline__ void load_rows_to_shared(const PrefillArgs& args, u8* rows, u32 pitch) {
    const u32 width = args.in_features / 8;
    for (u32 in_block = 0; in_block < args.block_rows; ++in_block) {
        const u32 row = blockIdx.x * args.block_rows + in_block;
        if (row >= args.rows) return;
        const u16* x = static_cast<const u16*>(args.x) + row * args.x_stride;
        for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
            u8* to = rows + in_block * pitch + i / 8 * BLOCK_K_PITCH + i % 8 * 16;
            if (8 * i < args.in_width) cp_async_16(shared_address(to), x + 8 * i);
            else *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
        }
    }
}
__device__ __forceinline__ void load_rows_to_shared(const PrefillArgs& args, u8* rows) { load_rows_to_shared(args, rows, row_pitch(args)); }

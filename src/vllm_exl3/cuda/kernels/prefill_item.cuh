// The input side of prefill: rows on their way to shared memory, and their largest magnitudes.
#pragma once
#include "prefill_problem.cuh"

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

constexpr u32 UNIT_PITCH = 2 * UNIT_IN + 16;  // bytes of a row's unit in shared memory, padded against bank conflicts

// The largest magnitude; a NaN is above all, so that its row comes out as NaN and not as something plausible.
__device__ __forceinline__ float larger(float most, float value) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(most), "f"(fabsf(value)));
    return result;
}

// Starts to bring a shard's suh to shared memory.
__device__ __forceinline__ void hold_suh(const PrefillArgs& args, u32 shard, u8* suh) {
    const u16* from = args.shards[shard].suh;
    for (u32 i = threadIdx.x; i < args.in_features / 8; i += blockDim.x)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(suh + i / 8 * UNIT_PITCH + i % 8 * 16)), "l"(from + 8 * i) : "memory");
}

// Starts to bring the block's rows to shared memory.
__device__ __forceinline__ void hold_rows(const PrefillArgs& args, u8* rows, u32 pitch) {
    const u32 width = args.in_features / 8;
    for (u32 in_block = 0; in_block < args.block_rows; ++in_block) {
        const u32 row = blockIdx.x * args.block_rows + in_block;
        if (row >= args.rows) return;
        const u16* x = static_cast<const u16*>(args.x) + row * args.x_stride;
        for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
            u8* to = rows + in_block * pitch + i / 8 * UNIT_PITCH + i % 8 * 16;
            if (8 * i < args.in_width) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(x + 8 * i) : "memory");
            else *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
        }
    }
}

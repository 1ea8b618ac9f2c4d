// The output side of one token's n tile: H, the row's scale, svh, bias, crop, cast.
#pragma once
#include "base/hadamard.cuh"

// One warp; lane l holds channels 4l..4l+3 of the n tile, `column` is its first stored column, `descale` the row's scale.
template <class Args, class Shard>
__device__ __forceinline__ void store_token(const Args& args, const Shard& shard, const float4& value, float descale,
                                            uint2 packed_svh, u32 column, u32 row, int lane) {
    float v[4] = {value.x, value.y, value.z, value.w};
    const float scale = descale * HADAMARD_SCALE;
    hadamard128(v, lane);
    const u16 svh[4] = {u16(packed_svh.x), u16(packed_svh.x >> 16), u16(packed_svh.y), u16(packed_svh.y >> 16)};
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = v[i] * scale * half_to_float(svh[i]);
    const u32 kept = column - shard.crop_start;  // wraps below the crop, so one comparison serves both ends
    u16* const out = static_cast<u16*>(args.out) + (row * args.out_stride + shard.out_column + kept);
    if (args.bias == nullptr && args.out_type != F32 && kept < shard.crop_size && shard.crop_size - kept >= 4 && reinterpret_cast<u64>(out) % 8 == 0) {
        u32 bits[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) bits[i] = args.out_type == F16 ? float_to_half(v[i]) : float_to_bfloat(v[i]);
        *reinterpret_cast<uint2*>(out) = {bits[0] | bits[1] << 16, bits[2] | bits[3] << 16};
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        if (kept + i >= shard.crop_size) continue;
        if (args.bias != nullptr) v[i] += load_element(args.bias, shard.out_column + (kept + i), args.bias_type);
        store_element(args.out, row * args.out_stride + shard.out_column + (kept + i), args.out_type, v[i]);
    }
}

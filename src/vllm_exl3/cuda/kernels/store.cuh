// The output side of one token's strip: H, the row's scale, svh, bias, crop, cast.
#pragma once
#include "hadamard.cuh"

// One warp; lane l holds channels 4l..4l+3 of the strip, `column` is its first stored column, `undo` the row's scale.
template <class Args, class Shard>
__device__ __forceinline__ void store_token(const Args& args, const Shard& shard, const float4& value, float undo,
                                            uint2 packed_svh, u32 column, u32 row, int lane) {
    float v[4] = {value.x, value.y, value.z, value.w};
    const float scale = undo * HADAMARD_SCALE;
    hadamard128(v, lane);
    const u16 svh[4] = {u16(packed_svh.x), u16(packed_svh.x >> 16), u16(packed_svh.y), u16(packed_svh.y >> 16)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 kept = column + i - shard.crop_start;  // wraps below the crop, so one comparison serves both ends
        if (kept >= shard.crop_size) continue;
        float result = v[i] * scale * half_to_float(svh[i]);
        if (args.bias != nullptr) result += load_element(args.bias, shard.out_column + kept, args.bias_type);
        store_element(args.out, row * args.out_stride + shard.out_column + kept, args.out_type, result);
    }
}

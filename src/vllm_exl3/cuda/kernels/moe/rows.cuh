// The input side of one row of one projection where rows lie by slot: x (times its routing weight where the model says so) or
// the activated outputs of the first stage, times suh, rotated, scaled, and stored as the GEMM multiplies it.
//
// How rows lie:
//   by slot (few rows): [slot][projection], 2·in_features bytes: INTEGER the high and then the low plane of int8, others fp16
//   grouped (many):     [projection][expert][k block][8 of the expert's rows], 1024 bytes: fp16 as eight 8×8 matrices
//                       (wide/arguments.cuh); an expert's rows begin at a multiple of 8
#pragma once
#include "moe/activation.cuh"
#include "moe/launch.cuh"
#include "moe/arguments.cuh"
#include "base/row_scale.cuh"

constexpr int ROW_THREADS = 256;
constexpr u32 GROUP_ROWS = 8;
constexpr u32 GROUP_BYTES = GROUP_ROWS * BLOCK_K * 2;

// Four neighbouring channels before suh; beyond `in_width` they are zero.
__device__ __forceinline__ float4 source_values(const MoeArgs& args, const MoeStage& stage, u32 slot, u32 channel) {
    float v[4] = {};
    if (args.stage == 0) {
        const u32 token = slot / args.top_k;
        const i64 at = token * args.x_stride + channel;
        const float weight = args.weight_on_input ? args.weights[slot] : 1.0f;
        const bool whole = channel + 4 <= stage.in_width;
        if (whole && args.x_type != F32 && (reinterpret_cast<u64>(args.x) + 2 * at) % 8 == 0) {
            const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const u16*>(args.x) + at);
            const u16 bits[4] = {u16(raw.x), u16(raw.x >> 16), u16(raw.y), u16(raw.y >> 16)};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                v[i] = (args.x_type == F16 ? half_to_float(bits[i]) : __uint_as_float(u32(bits[i]) << 16)) * weight;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (channel + i < stage.in_width) v[i] = load_element(args.x, at + i, args.x_type) * weight;
        }
    } else {
        const MoeStage& first = args.stages[0];
        const float4 gate = stage_output(first, slot, 0, channel);
        const float4 up = first.projections == 2 ? stage_output(first, slot, 1, channel) : gate;
        float g[4] = {gate.x, gate.y, gate.z, gate.w};
        const float u[4] = {up.x, up.y, up.z, up.w};
        activate_all(args.activation, g, u, args.alpha, args.beta, args.limit);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = channel + i < stage.in_width ? g[i] : 0.0f;
    }
    return make_float4(v[0], v[1], v[2], v[3]);
}

// Stores four rotated channels (4·lane .. 4·lane+3 of a 128-block); returns the sum of the quantised ones.
__device__ __forceinline__ int store_by_slot(u8* row, const float4& value, float factor, u32 arithmetic, u32 in_features, u32 channel) {
    const float v[4] = {value.x * factor, value.y * factor, value.z * factor, value.w * factor};
    if (arithmetic != INTEGER) {
        *reinterpret_cast<uint2*>(row + 2 * channel) = make_uint2(half_pair(v[0], v[1]), half_pair(v[2], v[3]));
        return 0;
    }
    u32 high = 0, low = 0;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int a = __float2int_rn(v[i]), top = (a + 64) >> 7;
        high |= (u32(top) & 0xffu) << (8 * i), low |= (u32(a - 128 * top) & 0xffu) << (8 * i);
        sum += a;
    }
    *reinterpret_cast<u32*>(row + channel) = high;
    *reinterpret_cast<u32*>(row + in_features + channel) = low;
    return sum;
}

// One thread block; `values` [in_features] and `reduced` [2] are shared memory. In the second stage it begins the launch.
__device__ __forceinline__ void transform_row(const MoeArgs& args, u32 slot, u32 index, float* values, u32* reduced) {
    const MoeStage& stage = args.stages[args.stage];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int expert = expert_of(args, slot);
    const bool mine = expert >= 0 && rows_owner(args, stage, expert, index) == index;
    const Projection& projection = projection_of(args, max(expert, 0), stage.first + index);
    const u32 arithmetic = arithmetic_of(args, projection.codebook);
    const u16* suh = stage.suh + projection.suh;
    if (args.stage == 1) {
        if (mine)
            for (u32 channel = warp * HADAMARD_SIZE + 4 * lane; channel < stage.in_features; channel += ROW_THREADS / 32 * HADAMARD_SIZE) prefetch(suh + channel);
        begin_launch();
    }
    if (!mine) return;
    if (threadIdx.x < 2) reduced[threadIdx.x] = 0;
    u32 bits = 0;
    for (u32 channel = warp * HADAMARD_SIZE + 4 * lane; channel < stage.in_features; channel += ROW_THREADS / 32 * HADAMARD_SIZE) {
        const float4 value = source_values(args, stage, slot, channel);
        const uint2 raw = *reinterpret_cast<const uint2*>(suh + channel);
        float v[4] = {value.x * half_to_float(u16(raw.x)), value.y * half_to_float(u16(raw.x >> 16)),
                      value.z * half_to_float(u16(raw.y)), value.w * half_to_float(u16(raw.y >> 16))};
        if (arithmetic != INTEGER) bits = max(bits, magnitude_bits(v));
        hadamard128(v, lane);
        if (arithmetic == INTEGER) bits = max(bits, magnitude_bits(v));
        *reinterpret_cast<float4*>(values + channel) = make_float4(v[0], v[1], v[2], v[3]);
    }
    __syncthreads();
    bits = __reduce_max_sync(0xffffffffu, bits);
    if (lane == 0) atomicMax(&reduced[0], bits);
    __syncthreads();
    const RowScale scale = row_scale(arithmetic, reduced[0]);
    const u32 at = slot * stage.projections + index;
    u8* row = stage.rows + static_cast<u64>(at) * 2 * stage.in_features;
    int sum = 0;
    for (u32 channel = warp * HADAMARD_SIZE + 4 * lane; channel < stage.in_features; channel += ROW_THREADS / 32 * HADAMARD_SIZE) {
        const float4 value = *reinterpret_cast<const float4*>(values + channel);
        sum += store_by_slot(row, value, scale.factor, arithmetic, stage.in_features, channel);
    }
    if (arithmetic == INTEGER) {
        sum = __reduce_add_sync(0xffffffffu, sum);
        if (lane == 0) atomicAdd(reinterpret_cast<int*>(&reduced[1]), sum);
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        stage.descale[at] = scale.descale;
        if (arithmetic == INTEGER) stage.sums[at] = static_cast<int>(reduced[1]);
    }
}

// Rows as the grouped GEMM stores them (moe/epilogue.cuh), read sixteen at a time: output Hadamard by tensor cores, scales, bias.
#pragma once
#include "moe/epilogue.cuh"
#include "moe/rotate.cuh"

// The channel bits that the A operand's slots have in a stored row, and those of the products' columns: with these a lane has
// eight neighbouring channels of the output.
__device__ __forceinline__ Signs output_signs(int lane) { return Signs(lane, 0x4203, 0x2430); }

// A lane's part of 128 stored channels of two rows: rows g and g + 8 of sixteen, words 4q..4q+3 of each 32 channels.
struct StoredBlock {
    uint4 raw[4][2];

    __device__ __forceinline__ void load(const MoeStage& stage, const u32 (&rows)[2], u32 index, u32 block, int lane) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u64 at = (static_cast<u64>(rows[r]) * stage.projections + index) * stage.out_features + block * HADAMARD_SIZE + 8 * (lane & 3);
            const uint4* row = reinterpret_cast<const uint4*>(static_cast<const u16*>(stage.out) + at);
#pragma unroll
            for (int u = 0; u < 4; ++u) raw[u][r] = rows[r] == NOWHERE ? make_uint4(0, 0, 0, 0) : row[4 * u];
        }
    }
    // Afterwards sums[2u + b2][tile][2r + i] is row r's channel 32u + 8q + 4·tile + 2·b2 + i, unscaled.
    __device__ __forceinline__ void rotate(float (&sums)[8][2][4], const Signs& signs) const {
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const u32 even[4] = {raw[u][0].x, raw[u][1].x, raw[u][0].y, raw[u][1].y};
            const u32 odd[4] = {raw[u][0].z, raw[u][1].z, raw[u][0].w, raw[u][1].w};
            multiply_signs(sums[2 * u], even, signs);
            multiply_signs(sums[2 * u + 1], odd, signs);
        }
        rotate_rest(sums);
    }
};

// From a stored value, rotated, to y before svh.
__device__ __forceinline__ float output_factor(const MoeArgs& args, const MoeStage& stage, u32 expert, u32 index, u32 row) {
    return stage.descale[rows_owner(args, stage, expert, index) * args.padded_rows + row] * (HADAMARD_SCALE / STORED_SCALE);
}

// Eight neighbouring channels of row r of the u-th 32 of `sums`, as StoredBlock::rotate leaves them, times `factor` and svh.
__device__ __forceinline__ void scaled_outputs(float* v, const float (&sums)[8][2][4], int u, int r, float factor, const uint4& svh) {
    float scales[8];
    convert_scales(scales, svh);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = sums[2 * u + (i >> 1 & 1)][i >> 2][2 * r + (i & 1)] * factor * scales[i];
}

// Adds `factor` times the bias of eight neighbouring channels, where there is one.
__device__ __forceinline__ void add_bias(float* v, const MoeStage& stage, const Projection& projection, u32 channel, float factor) {
    if (stage.bias == nullptr) return;
    asm volatile("" : "+r"(channel));  // or the compiler keeps all addresses and conditions of its callers' loops in registers
    const float* bias = stage.bias + projection.bias + channel;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (channel + i < stage.out_width) v[i] += factor * bias[i];
}

__device__ __forceinline__ const uint4& eight_scales(const u16* scales, u32 channel) { return *reinterpret_cast<const uint4*>(scales + channel); }

// The end of an item of the grouped GEMM for many rows: output Hadamard, scales, bias, and rows rounded to fp16.
#pragma once
#include "moe_ring.cuh"
#include "moe_strip.cuh"

constexpr float MUL1_FACTOR = 1774.0f / 262144.0f;            // k_inv, fp16 0x1EEE
constexpr float MUL1_RATIO = -10.3828125f / MUL1_FACTOR;      // k_bias / k_inv, k_bias fp16 0xC931

// One lane's sixteen channels of a row: rounded to fp16 below 2^15, the 128 channels' scale apart.
__device__ __forceinline__ void store_rounded(const MoeStage& stage, const float (&v)[4][4], u64 at, int lane, bool exists) {
    u32 bits = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) bits = max(bits, magnitude_bits(v[j]));
#pragma unroll
    for (int step = 1; step < 8; step *= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, step));
    if (!exists) return;
    // 2^e at the largest magnitude becomes 2^14; a NaN or an infinity stays what it is.
    const u32 exponent = min(max(bits >> 23, 15u), 254u);
    const float factor = __uint_as_float((268u - exponent) << 23);
    u16* out = static_cast<u16*>(stage.out) + at * STRIP + 4 * (lane & 7);
#pragma unroll
    for (int j = 0; j < 4; ++j)
        *reinterpret_cast<uint2*>(out + 32 * j) =
            make_uint2(half_pair(v[j][0] * factor, v[j][1] * factor), half_pair(v[j][2] * factor, v[j][3] * factor));
    if ((lane & 7) == 0) stage.out_scales[at] = __uint_as_float((exponent - 14u) << 23);
}

// Output Hadamard, scales and bias of a pair's Hadamard block; eight lanes take a row.
template <int ROWS, class Pair>
__device__ __forceinline__ void finish_rows(float (&sums)[ROWS / 2], const Pair& pair, const RowBlock& rows, u32 index, u32 strip) {
    const MoeStage& stage = pair.stage;
    const Projection& projection = projection_of(pair.args, rows.expert, stage.first + index);
    const u32 owner = rows_owner(pair.args, stage, rows.expert, index);
    const int lane = pair.lane;
    const u32 first_channel = strip * STRIP + 4 * (lane & 7);
    hadamard_own(sums);
    const u32 staged = pair.staging() + 4 * (2 * (lane & 3) * STAGED_PITCH + 16 * (pair.warp % PAIR_WARPS) + (lane >> 2));
#pragma unroll 1
    for (u32 chunk = 0; chunk * STAGED_ROWS < rows.rows; ++chunk) {
        pair.sync();
        if (chunk == 0) stage_rows<0>(sums, staged);  // registers have no run-time index
        if constexpr (ROWS > 32)
            if (chunk == 1) stage_rows<32>(sums, staged);
        if constexpr (ROWS > 64) {
            if (chunk == 2) stage_rows<64>(sums, staged);
            if (chunk == 3) stage_rows<96>(sums, staged);
        }
        if constexpr (ROWS > 128) {
            if (chunk == 4) stage_rows<128>(sums, staged);
            if (chunk == 5) stage_rows<160>(sums, staged);
            if (chunk == 6) stage_rows<192>(sums, staged);
            if (chunk == 7) stage_rows<224>(sums, staged);
        }
        pair.sync();
        const u32 token = 4 * (pair.warp % PAIR_WARPS) + (lane >> 3), row = chunk * STAGED_ROWS + token;
        const bool exists = row < rows.rows;
        const u32 slot = exists ? pair.args.order[rows.first + row] : 0;
        const u32 at = slot * stage.projections + owner;
        float scale = exists ? stage.undo[at] * HADAMARD_SCALE : 0.0f, constant = 0.0f;
        if (projection.codebook == MUL1) {
            // After the step of channel bit 3 (lane bit 1) the constant is twice itself in one half and nothing in the other.
            constant = exists && !(lane & 2) ? 2.0f * MUL1_RATIO * reinterpret_cast<const float*>(stage.sums)[at] : 0.0f;
            scale *= MUL1_FACTOR;
        }
        float v[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) load_shared(v[j], pair.staging() + 4 * (token * STAGED_PITCH + 4 * (lane & 7) + 32 * j));
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) v[j][i] += constant;
        hadamard128_rest(v, lane);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 channel = first_channel + 32 * j;
            const uint2 raw = *reinterpret_cast<const uint2*>(stage.svh + projection.svh + channel);
            const u16 svh[4] = {u16(raw.x), u16(raw.x >> 16), u16(raw.y), u16(raw.y >> 16)};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                v[j][i] = v[j][i] * scale * half_to_float(svh[i]);
                if (stage.bias != nullptr && channel + i < stage.out_width) v[j][i] += stage.bias[projection.bias + channel + i];
            }
        }
        store_rounded(stage, v, (static_cast<u64>(slot) * stage.projections + index) * (stage.out_features / STRIP) + strip, lane, exists);
    }
}

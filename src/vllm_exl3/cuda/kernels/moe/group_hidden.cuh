// The second stage's input where rows are grouped: the first stage's outputs, sixteen rows at a time, through their output
// transform, the activation and the input transform of down.
#pragma once
#include "moe/group_rows.cuh"

// Shared memory: each warp's `scales` of a 128-block, [svh of gate, svh of up, suh of down][128]; what was activated: fp16, each
// 32 channels of a row with a power of two of their own, as the A operand of their products; and those channels' largest
// values. Where there is room for all blocks (`args.keep_hidden`) what was activated is kept between the two passes, else each
// warp has one.
struct HiddenMemory {
    uint4* scales;
    uint2* fragments;  // [kept block][32 channels][b2][r][lane]
    u32* largest;      // [kept block][32 channels][CHUNK_ROWS]
    __device__ __forceinline__ HiddenMemory(u8* memory, u32 blocks, u32 warps, u32 warp)
        : scales(reinterpret_cast<uint4*>(memory) + warp * 48), fragments(reinterpret_cast<uint2*>(memory + warps * 768)),
          largest(reinterpret_cast<u32*>(fragments + blocks * 4 * 2 * 2 * 32)) {}
};

// Operands that a chunk's 128-blocks have in common.
struct HiddenSource {
    const u16* scales[3];  // as HiddenMemory names them
    float factors[2][2];   // of gate (or up alone) and up, of a lane's two rows
    __device__ __forceinline__ HiddenSource(const MoeArgs& args, const MoeStage& stage, u32 expert, const u32 (&rows)[2]) {
        const MoeStage& first = args.stages[0];
        const u32 gated = first.projections - 1;
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            scales[i] = first.svh + projection_of(args, expert, i & gated).svh;
#pragma unroll
            for (int r = 0; r < 2; ++r) factors[i][r] = output_factor(args, first, expert, i & gated, rows[r]);
        }
        scales[2] = stage.suh + projection_of(args, expert, stage.first).suh;
    }
};

// The exponent, as float bits have it, of the power of two in a row's factor: HADAMARD_SCALE lies in [2^-4, 2^-3).
__device__ __forceinline__ u32 factor_exponent(const RowScale& scale) { return (__float_as_uint(scale.factor) >> 23) + 4; }

// 2^e at the largest magnitude becomes 2^14.
__device__ __forceinline__ u32 local_exponent(u32 bits) { return 268u - min(max(bits >> 23, 15u), 254u); }

// The largest of four lanes' magnitudes.
__device__ __forceinline__ u32 quad_largest(const float (&v)[8]) {
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) bits = max(bits, __float_as_uint(fabsf(v[i])));
    bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 1));
    return max(bits, __shfl_xor_sync(0xffffffffu, bits, 2));
}

// Scales rotated sums in place; they stay where they are.
__device__ __forceinline__ void scale_sums(float (&sums)[8][2][4], const float (&factors)[2], const uint4* svh) {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
        float scales[8];
        convert_scales(scales, svh[4 * u]);
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float& value = sums[2 * u + (i >> 1 & 1)][i >> 2][2 * r + (i & 1)];
                value = value * factors[r] * scales[i];
            }
    }
}

// Reads 128 channels of a chunk's gates and ups, and stores them activated, times suh, in place `place` of `memory`. There are
// many activations: a loop that is not unrolled keeps the code within the instruction cache.
__device__ __forceinline__ void activate_block(const MoeArgs& args, const MoeStage& stage, const RowBlock& block, const Chunk& chunk,
                                               const HiddenSource& source, const Signs& signs, const HiddenMemory& memory, u32 b, u32 place,
                                               u32 (&most)[2], int lane) {
    const MoeStage& first = args.stages[0];
    const u32 channel = b * HADAMARD_SIZE + 8 * (lane & 3), gated = first.projections - 1;
    float gates[8][2][4], ups[8][2][4];
    StoredBlock gate, up;
    gate.load(first, chunk.rows, 0, b, lane);
    up.load(first, chunk.rows, gated, b, lane);
    __syncwarp();
    memory.scales[lane] = *reinterpret_cast<const uint4*>((lane < 16 ? source.scales[0] : source.scales[1]) + b * HADAMARD_SIZE + 8 * (lane & 15));
    if (lane < 16) memory.scales[32 + lane] = *reinterpret_cast<const uint4*>(source.scales[2] + b * HADAMARD_SIZE + 8 * lane);
    __syncwarp();
    const uint4* scales = memory.scales + (lane & 3);
    up.rotate(ups, signs), scale_sums(ups, source.factors[1], scales + 16);
    if (gated) {
        gate.rotate(gates, signs), scale_sums(gates, source.factors[0], scales);
    } else {
#pragma unroll
        for (int i = 0; i < 64; ++i) gates[i / 8][i / 4 % 2][i % 4] = ups[i / 8][i / 4 % 2][i % 4];
    }
#pragma unroll 1
    for (u32 half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int u = i / 2, r = i % 2;
            const u32 part = 2 * half + u, at = channel + 32 * part;
            float v[8], outputs[8], scale[8];
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                v[c] = gates[2 * u + (c >> 1 & 1)][c >> 2][2 * r + (c & 1)];
                outputs[c] = ups[2 * u + (c >> 1 & 1)][c >> 2][2 * r + (c & 1)];
            }
            if (first.bias != nullptr) {
                if (gated) add_bias(v, first, projection_of(args, block.expert, 0), at, 1.0f);
                add_bias(outputs, first, projection_of(args, block.expert, gated), at, 1.0f);
            }
            activate_all(args.activation, v, outputs, args.alpha, args.beta, args.limit);
            convert_scales(scale, scales[32 + 4 * part]);
#pragma unroll
            for (int c = 0; c < 8; ++c) v[c] *= scale[c];
            if (at + 8 > stage.in_width)
#pragma unroll
                for (int c = 0; c < 8; ++c) v[c] = at + c < stage.in_width ? v[c] : 0.0f;
            const u32 bits = quad_largest(v);
            const float power = __uint_as_float(local_exponent(bits) << 23);
            most[r] = max(most[r], bits);
            if ((lane & 3) == 0) memory.largest[(4 * place + part) * CHUNK_ROWS + chunk.place + 8 * r] = bits;
#pragma unroll
            for (int b2 = 0; b2 < 2; ++b2)
                memory.fragments[((2 * (4 * place + part) + b2) * 2 + r) * 32 + lane] =
                    make_uint2(half_pair(v[4 * b2] * power, v[4 * b2 + 1] * power), half_pair(v[4 * b2 + 2] * power, v[4 * b2 + 3] * power));
        }
#pragma unroll
        for (int t = 0; t < 4; ++t)  // the other 64 channels
#pragma unroll
            for (int i = 0; i < 8; ++i)
                gates[t][i / 4][i % 4] = gates[t + 4][i / 4][i % 4], ups[t][i / 4][i % 4] = ups[t + 4][i / 4][i % 4];
    }
}

// One 128-block of what was kept, rotated; `factors` lead from the channels' own power of two to the row's.
__device__ __forceinline__ void rotate_kept(float (&sums)[8][2][4], const HiddenMemory& memory, const Chunk& chunk, u32 place,
                                            const RowScale (&scales)[2], const Signs& signs, int lane) {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
        float factors[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int exponent = static_cast<int>(factor_exponent(scales[r])) + 127 -
                static_cast<int>(local_exponent(memory.largest[(4 * place + u) * CHUNK_ROWS + chunk.place + 8 * r]));
            factors[r] = exponent > 0 ? __uint_as_float(min(exponent, 254) << 23) * HADAMARD_SCALE : 0.0f;
        }
#pragma unroll
        for (int b2 = 0; b2 < 2; ++b2) {
            const uint2 *row = memory.fragments + (2 * (4 * place + u) + b2) * 64 + lane, first = row[0], second = row[32];
            const u32 a[4] = {first.x, second.x, first.y, second.y};
            multiply_signs(sums[2 * u + b2], a, signs);
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[2 * u + b2][i / 4][i % 4] *= factors[i % 4 / 2];
        }
    }
    rotate_rest(sums);
}

// One thread block: one chunk. The row's largest value is needed before anything can be stored, hence two passes.
__device__ __forceinline__ void transform_hidden(const MoeArgs& args, const MoeStage& stage, const RowBlock& block, const Signs& out_signs,
                                                 const Signs& signs, u32* largest, float* totals, u8* shared) {
    const int lane = threadIdx.x & 31;
    const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32, blocks = stage.in_features / HADAMARD_SIZE;
    const Chunk chunk(block, args.starts[block.expert], args.starts[block.expert + 1], lane);
    const HiddenMemory memory(shared, args.keep_hidden ? blocks : warps, warps, warp);
    const HiddenSource source(args, stage, block.expert, chunk.rows);
    if (threadIdx.x < CHUNK_ROWS) largest[threadIdx.x] = 0;
    __syncthreads();
    RowScale scales[2];
#pragma unroll 1
    for (u32 pass = 0; pass < 2; ++pass) {
        u32 most[2] = {};
#pragma unroll 1
        for (u32 b = warp; b < blocks; b += warps) {
            const u32 place = args.keep_hidden ? b : warp;
            if (pass == 0 || !args.keep_hidden) activate_block(args, stage, block, chunk, source, out_signs, memory, b, place, most, lane);
            if (pass == 0) continue;
            __syncwarp();
            float sums[8][2][4], stored[2];
            rotate_kept(sums, memory, chunk, place, scales, signs, lane);
            store_rows(stored, chunk.group(args, stage, 0), chunk.k_block_bytes, sums, chunk.count, b, lane);
            chunk.keep(totals, stored, b, lane);
            __syncwarp();
        }
        if (pass == 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if ((lane & 3) == 0) atomicMax(&largest[chunk.place + 8 * r], most[r]);
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 2; ++r) scales[r] = row_scale(HALF, largest[chunk.place + 8 * r]);
    }
    chunk.store_sums(args, stage, 0, totals);
    if (threadIdx.x < chunk.count) stage.descale[chunk.first + threadIdx.x] = row_scale(HALF, largest[threadIdx.x]).descale;
    __syncthreads();  // shared memory is used again
}

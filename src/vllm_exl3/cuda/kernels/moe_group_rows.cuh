// The input transform of grouped rows by tensor cores, sixteen rows at a time.
#pragma once
#include "moe_rotate.cuh"

// The two rows of a lane, which are row g and g + 8 of a chunk, and where the chunk is stored.
struct Chunk {
    u32 slots[2], count, unit_bytes, place;  // place: the lane's first row
    u8* group;

    __device__ __forceinline__ Chunk(const MoeArgs& args, const MoeStage& stage, const RowBlock& block, u32 index, int lane) {
        count = block.rows, place = lane >> 2;
#pragma unroll
        for (u32 r = 0; r < 2; ++r) slots[r] = args.order[block.first + min(place + 8 * r, count - 1)];
        const u32 start = args.starts[block.expert];
        unit_bytes = (args.starts[block.expert + 1] - start) * UNIT_IN * 2;
        group = stage.rows + (static_cast<u64>(index) * args.padded_rows + start) * 2 * stage.in_features +
            (block.first - start) / GROUP_ROWS * GROUP_BYTES;
    }
    // Once for a block, when all warps have left their 128-blocks' sums: what undoes the rows' scales, and the rows' sums.
    __device__ __forceinline__ void store_row_facts(const MoeStage& stage, u32 index, const RowScale (&scales)[2],
                                                    const float* totals) const {
        __syncthreads();
        if (threadIdx.x >= 32 || (threadIdx.x & 3)) return;
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            if (place + 8 * r >= count) continue;
            const u32 at = slots[r] * stage.projections + index;
            float sum = 0.0f;
            for (u32 block = 0; block < stage.in_features / STRIP; ++block) sum += totals[block * CHUNK_ROWS + place + 8 * r];
            stage.undo[at] = scales[r].undo;
            reinterpret_cast<float*>(stage.sums)[at] = sum;
        }
    }
    __device__ __forceinline__ void keep(float* totals, const float (&sums)[2], u32 block, int lane) const {
        if ((lane & 3) == 0) totals[block * CHUNK_ROWS + place] = sums[0], totals[block * CHUNK_ROWS + place + 8] = sums[1];
    }
};

// The exponent, as float bits have it, of the power of two in a row's factor: HADAMARD_SCALE lies in [2^-4, 2^-3).
__device__ __forceinline__ u32 factor_exponent(const RowScale& scale) { return (__float_as_uint(scale.factor) >> 23) + 4; }

// First stage. One thread block: one chunk, all channels of one projection. x is read twice: for the
// rows' largest values, and to be transformed.
template <bool FAST>
__device__ __forceinline__ void transform_inputs(const MoeArgs& args, const MoeStage& stage, const RowBlock& block, u32 index,
                                                 const Signs& signs, u32* largest, float* totals) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const u32 blocks = stage.in_features / STRIP;
    const u16* suh = stage.suh + projection_of(args, block.expert, stage.first + index).suh;
    const Chunk chunk(args, stage, block, index, lane);
    ChunkRow rows[2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
        rows[r].at = chunk.slots[r] / args.top_k * args.x_stride;
        rows[r].weight = args.weight_on_input ? args.weights[chunk.slots[r]] : 1.0f;
    }
    if (threadIdx.x < CHUNK_ROWS) largest[threadIdx.x] = 0;
    __syncthreads();
    u32 bits[2] = {};
    ChunkInput<FAST> input;
    for (u32 b = warp; b < blocks; b += GROUP_WARPS) {
        input.load(args, stage.in_width, rows, suh, b, lane);
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            float v[2][8];
            input.scaled(v, u, args, rows);
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int i = 0; i < 8; ++i) bits[r] = max(bits[r], __float_as_uint(fabsf(v[r][i])));
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        bits[r] = max(bits[r], __shfl_xor_sync(0xffffffffu, bits[r], 1));
        bits[r] = max(bits[r], __shfl_xor_sync(0xffffffffu, bits[r], 2));
        if ((lane & 3) == 0) atomicMax(&largest[chunk.place + 8 * r], bits[r]);
    }
    __syncthreads();
    const RowScale scales[2] = {row_scale(HALF, largest[chunk.place]), row_scale(HALF, largest[chunk.place + 8])};
    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) factors[r] = __uint_as_float(factor_exponent(scales[r]) << 23);
    for (u32 b = warp; b < blocks; b += GROUP_WARPS) {
        float sums[8][2][4];
        input.load(args, stage.in_width, rows, suh, b, lane);
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            float v[2][8];
            input.scaled(v, u, args, rows);
#pragma unroll
            for (int b2 = 0; b2 < 2; ++b2) {
                u32 a[4];
                pack_rows(a, v, factors, b2);
                multiply_signs(sums[2 * u + b2], a, signs);
            }
        }
        rotate_rest(sums);
#pragma unroll
        for (int t = 0; t < 8; ++t)
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[t][i / 4][i % 4] *= HADAMARD_SCALE;
        float stored[2];
        store_rows(stored, chunk.group, chunk.unit_bytes, sums, chunk.count, b, lane);
        chunk.keep(totals, stored, b, lane);
    }
    chunk.store_row_facts(stage, index, scales, totals);
    __syncthreads();  // shared memory is used again
}

// Eight neighbouring outputs of the first stage.
__device__ __forceinline__ void load_hidden(float (&v)[8], const MoeArgs& args, u32 slot, u32 index, u32 channel) {
    const MoeStage& first = args.stages[0];
    const u64 at = (static_cast<u64>(slot) * first.projections + index) * first.out_features + channel;
    const uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const u16*>(first.out) + at);
    const float scale = first.out_scales[at / STRIP];
    convert_scales(v, raw);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= scale;
}

// What the second stage's transform keeps in shared memory between its two passes: values in fp16, each 32 channels of a row
// with a power of two of their own, as the A operand of their products; and those channels' largest values.
struct Stash {
    uint4* fragments;  // [128-block][32 channels][b2][lane]
    u32* largest;      // [128-block][32 channels][CHUNK_ROWS]
    __device__ __forceinline__ Stash(u8* memory, u32 blocks)
        : fragments(reinterpret_cast<uint4*>(memory)), largest(reinterpret_cast<u32*>(memory + blocks * 4 * 2 * 32 * 16)) {}
};

// 2^e at the largest magnitude becomes 2^14.
__device__ __forceinline__ u32 local_exponent(u32 bits) { return 268u - min(max(bits >> 23, 15u), 254u); }

// Second stage: activation, then as above. What was activated is kept, not computed twice.
__device__ __forceinline__ void transform_hidden(const MoeArgs& args, const MoeStage& stage, const RowBlock& block,
                                                 const Signs& signs, u32* largest, float* totals, u8* memory) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const u32 blocks = stage.in_features / STRIP, gated = args.stages[0].projections - 1;
    const u16* suh = stage.suh + projection_of(args, block.expert, stage.first).suh;
    const Chunk chunk(args, stage, block, 0, lane);
    const Stash stash(memory, blocks);
    if (threadIdx.x < CHUNK_ROWS) largest[threadIdx.x] = 0;
    __syncthreads();
    u32 most[2] = {};
#pragma unroll 1
    for (u32 part = warp; part < 4 * blocks; part += GROUP_WARPS) {  // 32 channels
        const u32 channel = 32 * part + 8 * (lane & 3);
        float scale[8], v[2][8], factors[2];
        convert_scales(scale, *reinterpret_cast<const uint4*>(suh + channel));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float gate[8], up[8];
            load_hidden(gate, args, chunk.slots[r], 0, channel);
            load_hidden(up, args, chunk.slots[r], gated, channel);
            activate_all(args.activation, gate, up, args.alpha, args.beta, args.limit);
            u32 bits = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                v[r][i] = channel + i < stage.in_width ? gate[i] * scale[i] : 0.0f;
                bits = max(bits, __float_as_uint(fabsf(v[r][i])));
            }
            bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 1));
            bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 2));
            factors[r] = __uint_as_float(local_exponent(bits) << 23);
            most[r] = max(most[r], bits);
            if ((lane & 3) == 0) stash.largest[part * CHUNK_ROWS + chunk.place + 8 * r] = bits;
        }
#pragma unroll
        for (int b2 = 0; b2 < 2; ++b2) {
            u32 a[4];
            pack_rows(a, v, factors, b2);
            stash.fragments[(2 * part + b2) * 32 + lane] = make_uint4(a[0], a[1], a[2], a[3]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
        if ((lane & 3) == 0) atomicMax(&largest[chunk.place + 8 * r], most[r]);
    __syncthreads();
    const RowScale scales[2] = {row_scale(HALF, largest[chunk.place]), row_scale(HALF, largest[chunk.place + 8])};
    for (u32 b = warp; b < blocks; b += GROUP_WARPS) {
        float sums[8][2][4];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            float factors[2];  // from the channels' own power of two to the row's
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int exponent = static_cast<int>(factor_exponent(scales[r])) + 127 -
                    static_cast<int>(local_exponent(stash.largest[(4 * b + u) * CHUNK_ROWS + chunk.place + 8 * r]));
                factors[r] = exponent > 0 ? __uint_as_float(min(exponent, 254) << 23) * HADAMARD_SCALE : 0.0f;
            }
#pragma unroll
            for (int b2 = 0; b2 < 2; ++b2) {
                const uint4 raw = stash.fragments[(2 * (4 * b + u) + b2) * 32 + lane];
                const u32 a[4] = {raw.x, raw.y, raw.z, raw.w};
                multiply_signs(sums[2 * u + b2], a, signs);
#pragma unroll
                for (int i = 0; i < 8; ++i) sums[2 * u + b2][i / 4][i % 4] *= factors[i % 4 / 2];
            }
        }
        rotate_rest(sums);
        float stored[2];
        store_rows(stored, chunk.group, chunk.unit_bytes, sums, chunk.count, b, lane);
        chunk.keep(totals, stored, b, lane);
    }
    chunk.store_row_facts(stage, 0, scales, totals);
    __syncthreads();  // shared memory is used again
}

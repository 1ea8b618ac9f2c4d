// The input transform of grouped rows by tensor cores, sixteen rows at a time.
#pragma once
#include "moe_outputs.cuh"

// The two rows of a lane, which are row g and g + 8 of a chunk, and where the chunk is stored.
struct Chunk {
    u32 rows[2], count, unit_bytes, place;  // places in `order`, rows beyond the last repeat it; place: the lane's first row
    u32 start, first;                       // of the expert and of the chunk in `order`

    __device__ __forceinline__ Chunk(const MoeArgs& args, const MoeStage& stage, const RowBlock& block, int lane) {
        count = block.rows, place = lane >> 2, first = block.first, start = args.starts[block.expert];
#pragma unroll
        for (u32 r = 0; r < 2; ++r) rows[r] = first + min(place + 8 * r, count - 1);
        unit_bytes = (args.starts[block.expert + 1] - start) * UNIT_IN * 2;
    }
    __device__ __forceinline__ u8* group(const MoeArgs& args, const MoeStage& stage, u32 index) const {
        return stage.rows + (static_cast<u64>(index) * args.padded_rows + start) * 2 * stage.in_features + (first - start) / GROUP_ROWS * GROUP_BYTES;
    }
    // When all warps have left their 128-blocks' sums: the rows'.
    __device__ __forceinline__ void store_sums(const MoeArgs& args, const MoeStage& stage, u32 index, const float* totals) const {
        if (threadIdx.x >= count) return;
        float sum = 0.0f;
        for (u32 block = 0; block < stage.in_features / STRIP; ++block) sum += totals[block * CHUNK_ROWS + threadIdx.x];
        sums_of_rows(stage)[index * args.padded_rows + first + threadIdx.x] = sum;
    }
    __device__ __forceinline__ void keep(float* totals, const float (&sums)[2], u32 block, int lane) const {
        if ((lane & 3) == 0) totals[block * CHUNK_ROWS + place] = sums[0], totals[block * CHUNK_ROWS + place + 8] = sums[1];
    }
};

// From x to what is multiplied by suh, in fp16, and what undoes that and the transform's growth.
//
// The factor is a power of two such that no product exceeds 2^4, hence no rotated value 2^11, by the largest values of x and suh;
// nor x itself 2^14. What is far below the largest is not needed exactly.
__device__ __forceinline__ RowScale input_scale(float x, float suh) {
    const u32 product = __float_as_uint(x * suh) >> 23 & 0xffu, largest = __float_as_uint(x) >> 23 & 0xffu;  // below 2^(e - 126)
    const u32 exponent = min(min(257u - min(max(product, 4u), 254u), 267u - min(max(largest, 14u), 254u)), 253u);
    const float undo = __uint_as_float((254u - exponent) << 23) * HADAMARD_SCALE;
    return {__uint_as_float(exponent << 23), x * suh <= 2.9e37f ? undo : x * suh * 1.0e30f};
}

// First stage. One thread block: one chunk, for gate and up. A row's scale follows from the token's largest value and the
// projections' largest input scales, which exl3_moe_route leaves: x is read once.
template <bool FAST>
__device__ __forceinline__ void transform_inputs(const MoeArgs& args, const MoeStage& stage, const RowBlock& block, const Signs& signs, float* totals) {
    const int lane = threadIdx.x & 31;
    const u32 blocks = stage.in_features / STRIP;
    const Chunk chunk(args, stage, block, lane);
    const u32 own = stage.projections == 2 && rows_owner(args, stage, block.expert, 1) == 1 ? 2 : 1;  // with rows of their own
    i64 rows[2];
    float factors[2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
        const u32 slot = args.order[chunk.rows[r]], token = slot / args.top_k;
        const float weight = args.weight_on_input ? args.weights[slot] : 1.0f;
        const float* suh = args.scale_largest + block.expert * stage.projections;
        const RowScale scale = input_scale(args.row_largest[token] * fabsf(weight), fmaxf(suh[0], suh[own - 1]));
        rows[r] = token * args.x_stride, factors[r] = scale.factor * weight;
        if (threadIdx.x < 32 && (lane & 3) == 0 && chunk.place + 8 * r < chunk.count)
            for (u32 index = 0; index < own; ++index) stage.undo[index * args.padded_rows + chunk.rows[r]] = scale.undo;
    }
    ChunkInput<FAST> input;
#pragma unroll 1
    for (u32 b = threadIdx.x / 32; b < blocks; b += blockDim.x / 32) {
        const u32 first = b * STRIP + 8 * (lane & 3);
        input.load(args, rows, factors, first);
#pragma unroll 1
        for (u32 index = 0; index < own; ++index) {
            float sums[8][2][4], stored[2];
            input.rotate(sums, stage.suh + projection_of(args, block.expert, stage.first + index).suh, first, signs);
            rotate_rest(sums);
            store_rows(stored, chunk.group(args, stage, index), chunk.unit_bytes, sums, chunk.count, b, lane);
            chunk.keep(totals + index * blocks * CHUNK_ROWS, stored, b, lane);
        }
    }
    __syncthreads();
    for (u32 index = 0; index < own; ++index) chunk.store_sums(args, stage, index, totals + index * blocks * CHUNK_ROWS);
    __syncthreads();  // shared memory is used again
}

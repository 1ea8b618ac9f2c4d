// The end of a work tile of the grouped GEMM for many rows: sums are rounded to fp16 and stored as they lie, without the output
// Hadamard, which the reader applies: here the tensor cores would wait for it.
//
// `out` lies [row in `sorted_slots`][projection][out_features]. Of every 16 channels c, in place 2·(c mod 8) + c / 8, so that a lane
// stores both its channels as one word. One power of two fits all rows: they are scaled such that before the transform no
// channel exceeds 2^7.5, and that of each the largest is at least half of it; so sums of k channels against the codebooks'
// unit variance are about 2^6.5 to 2^7.5·sqrt(k), and below 2^9.5·k if they all conspire, since no weight exceeds 4. Times
// STORED_SCALE that is below fp16's largest for every k whose rows fit shared memory, and the usual sums are far above its
// subnormals.
#pragma once
#include "moe/pipeline.cuh"
#include "base/row_scale.cuh"

constexpr float STORED_SCALE = 0x1p-10f;

template <int ROWS, class Pair>
__device__ __forceinline__ void finish_rows(const float (&sums)[ROWS / 2], const Pair& pair, const RowBlock& rows, u32 index, u32 n_block) {
    const MoeStage& stage = pair.stage;
    const bool bytes = projection_of(pair.args, rows.expert, stage.first + index).codebook == MUL1;
    const float scale = bytes ? MUL1_SCALE * STORED_SCALE : STORED_SCALE;
    const u32 first = rows.first + 2 * (pair.lane & 3);
    float2 constants[ROWS / 8];  // of rows first + 8j and first + 8j + 1
    const float* totals = sums_of_rows(stage) + rows_owner(pair.args, stage, rows.expert, index) * pair.args.padded_rows + first;
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j)
        constants[j] = bytes ? *reinterpret_cast<const float2*>(totals + 8 * j) : make_float2(0.0f, 0.0f);
    const u32 pitch = stage.projections * stage.out_features / 2;  // words from a row to the next
    u32* at = static_cast<u32*>(stage.out) + static_cast<u64>(first) * pitch + index * (stage.out_features / 2) + n_block * (HADAMARD_SIZE / 2) +
        8 * pair.warp + (pair.lane >> 2);
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
        const float* d = sums + 4 * j;
        const float low = constants[j].x * (MUL1_BIAS * STORED_SCALE), high = constants[j].y * (MUL1_BIAS * STORED_SCALE);
        if (8 * j < rows.rows) {
            at[0] = half_pair(fmaf(d[0], scale, low), fmaf(d[2], scale, low));
            at[pitch] = half_pair(fmaf(d[1], scale, high), fmaf(d[3], scale, high));
        }
        at += 8 * pitch;
    }
}

// The input transform of grouped rows by tensor cores, sixteen rows at a time.
#pragma once
#include "moe/outputs.cuh"

// Of all blocks on a multiprocessor, which registers suffice for: by INSTANCE_STAGE.
constexpr int RESIDENT_THREADS[] = {512, 384, 640};

// The two rows of a lane, which are row g and g + 8 of a chunk, and where the chunk is stored.
struct Chunk {
    u32 rows[2], count, k_block_bytes, place;  // places in `sorted_slots`, rows beyond the last repeat it; place: the lane's first row
    u32 start, first;                       // of the expert and of the chunk in `sorted_slots`

    __device__ __forceinline__ Chunk(const RowBlock& block, u32 start, u32 stop, int lane) : start(start) {
        count = block.rows, place = lane >> 2, first = block.first;
#pragma unroll
        for (u32 r = 0; r < 2; ++r) rows[r] = first + min(place + 8 * r, count - 1);
        k_block_bytes = (stop - start) * BLOCK_K * 2;
    }
    __device__ __forceinline__ u8* group(const MoeArgs& args, const MoeStage& stage, u32 index) const {
        return stage.rows + (static_cast<u64>(index) * args.padded_rows + start) * 2 * stage.in_features + (first - start) / GROUP_ROWS * GROUP_BYTES;
    }
    // When all warps have left their 128-blocks' sums: the rows'.
    __device__ __forceinline__ void store_sums(const MoeArgs& args, const MoeStage& stage, u32 index, const float* totals) const {
        if (threadIdx.x >= count) return;
        float sum = 0.0f;
        for (u32 block = 0; block < stage.in_features / HADAMARD_SIZE; ++block) sum += totals[block * CHUNK_ROWS + threadIdx.x];
        sums_of_rows(stage)[index * args.padded_rows + first + threadIdx.x] = sum;
    }
    __device__ __forceinline__ void keep(float* totals, const float (&sums)[2], u32 block, int lane) const {
        if ((lane & 3) == 0) totals[block * CHUNK_ROWS + place] = sums[0], totals[block * CHUNK_ROWS + place + 8] = sums[1];
    }
};

// The first stage's input where rows are grouped: x times suh, rotated, sixteen rows at a time, for gate and up.
#pragma once
#include "base/cp_async.cuh"
#include "moe/group_rows.cuh"

// From x to what is multiplied by suh, in fp16, and what undoes that and the transform's growth.
//
// The factor is a power of two such that no product exceeds 2^4, hence no rotated value 2^11, by the largest values of x and suh;
// nor x itself 2^14. What is far below the largest is not needed exactly.
__device__ __forceinline__ RowScale input_scale(float x, float suh) {
    const u32 product = __float_as_uint(x * suh) >> 23 & 0xffu, largest = __float_as_uint(x) >> 23 & 0xffu;  // below 2^(e - 126)
    const u32 exponent = min(min(257u - min(max(product, 4u), 254u), 267u - min(max(largest, 14u), 254u)), 253u);
    const float descale = __uint_as_float((254u - exponent) << 23) * HADAMARD_SCALE;
    return {__uint_as_float(exponent << 23), x * suh <= 2.9e37f ? descale : x * suh * 1.0e30f};
}

// The next chunks of a block, in shared memory for its warps: looked up for many at once, since every step
// waits for the one before it.
struct InputChunks {
    static constexpr u32 COUNT = 16;
    struct RowInfo {
        u32 first, rows, start, stop, suh[2];
        // 2: up has input scales, hence rows, of its own.
        __device__ __forceinline__ u32 own() const { return suh[0] == suh[1] ? 1 : 2; }
    };
    RowInfo row_info[COUNT];
    u32 tokens[COUNT][CHUNK_ROWS];    // rows beyond the last repeat it
    float factors[COUNT][CHUNK_ROWS];  // from x to what is multiplied by suh

    // Chunks first, first + step and so on; all of a block's threads. A row's scale follows from the token's largest value and the
    // projections' largest input scales, which exl3_moe_route leaves: x is read once.
    __device__ __forceinline__ void find(const MoeArgs& args, const MoeStage& stage, u32 first, u32 step, u32 count) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < COUNT * CHUNK_ROWS && first + i / CHUNK_ROWS * step < count; i += blockDim.x) {
            const u32 index = i / CHUNK_ROWS, row = i % CHUNK_ROWS;
            const RowBlock block = args.chunks[first + index * step];
            const Projection* projections = &projection_of(args, block.expert, stage.first);
            const float* suh = args.scale_largest + block.expert * stage.projections;
            const u32 last = stage.projections - 1, at = block.first + min(row, block.rows - 1), slot = args.sorted_slots[at], token = slot / args.top_k;
            const float weight = args.weight_on_input ? args.weights[slot] : 1.0f;
            const RowScale scale = input_scale(args.row_largest[token] * fabsf(weight), fmaxf(suh[0], suh[last]));
            tokens[index][row] = token, factors[index][row] = scale.factor * weight;
            for (u32 j = 0; j < stage.projections && row < block.rows; ++j) stage.descale[j * args.padded_rows + at] = scale.descale;
            if (row == 0)
                row_info[index] = {block.first, block.rows, args.starts[block.expert], args.starts[block.expert + 1],
                                {static_cast<u32>(projections[0].suh), static_cast<u32>(projections[last].suh)}};
        }
        __syncthreads();
    }
};

// A warp's part of shared memory for one 128-block: x [32 channels][r][lane], sixteen bytes each, which only the lane itself
// reads; suh of gate and up.
struct InputSlot {
    uint4* x;
    uint4* suh;
    static constexpr u32 BYTES = 8 * 512 + 2 * 256;
    __device__ __forceinline__ explicit InputSlot(u8* memory) : x(reinterpret_cast<uint4*>(memory)), suh(x + 256) {}

    __device__ __forceinline__ void fetch(const MoeArgs& args, const MoeStage& stage, const InputChunks& chunks, u32 index, u32 block, int lane) const {
        const u32 first = block * HADAMARD_SIZE + 8 * (lane & 3);
        const u16* from[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            from[r] = static_cast<const u16*>(args.x) + chunks.tokens[index][(lane >> 2) + 8 * r] * args.x_stride + first;
#pragma unroll
        for (int u = 0; u < 4; ++u)
#pragma unroll
            for (int r = 0; r < 2; ++r) copy(x + (2 * u + r) * 32 + lane, from[r] + 32 * u, first + 32 * u < stage.in_width ? 16 : 0);
        copy(suh + lane, stage.suh + chunks.row_info[index].suh[lane >> 4] + block * HADAMARD_SIZE + 8 * (lane & 15), 16);
        cp_async_commit();
    }
    // x times the rows' factors, in fp16, where it was.
    template <u32 TYPE>
    __device__ __forceinline__ void scale(const float (&factors)[2], int lane) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float v[8];
            convert_channels(v, x[32 * i + lane], TYPE);
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) words[j] = half_pair(v[2 * j] * factors[i % 2], v[2 * j + 1] * factors[i % 2]);
            x[32 * i + lane] = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
    // Times suh, rotated, but for `rotate_rest`.
    __device__ __forceinline__ void rotate(float (&sums)[8][2][4], u32 index, const Signs& signs, int lane) const {
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const uint4 raw[3] = {x[64 * u + lane], x[64 * u + 32 + lane], suh[16 * index + 4 * u + (lane & 3)]};
            u32 even[4], odd[4];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                even[r] = multiply_halves(raw[r].x, raw[2].x), even[r + 2] = multiply_halves(raw[r].y, raw[2].y);
                odd[r] = multiply_halves(raw[r].z, raw[2].z), odd[r + 2] = multiply_halves(raw[r].w, raw[2].w);
            }
            multiply_signs(sums[2 * u], even, signs), multiply_signs(sums[2 * u + 1], odd, signs);
        }
    }

private:
    // Of `bytes`, the rest of sixteen is zero.
    static __device__ __forceinline__ void copy(uint4* to, const u16* from, u32 bytes) {
        cp_async_16(shared_address(to), from, bytes);
    }
};

// 16-bit inputs in aligned vectors. The next 128-block is always on its way, on over the ends of chunks. Shared memory: `totals`
// [projection][128-blocks][CHUNK_ROWS], then two slots a warp.
__device__ __forceinline__ void transform_inputs(const MoeArgs& args, const MoeStage& stage, const Signs& signs, InputChunks& chunks, float* totals) {
    const int lane = threadIdx.x & 31;
    const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32, blocks = stage.in_features / HADAMARD_SIZE, count = args.list_sizes[1];
    u8* memory = reinterpret_cast<u8*>(totals + stage.projections * blocks * CHUNK_ROWS) + 2 * warp * InputSlot::BYTES;
    u32 place = 0, index = InputChunks::COUNT;
#pragma unroll 1
    for (u32 i = blockIdx.x; i < count; i += gridDim.x, ++index) {
        if (index == InputChunks::COUNT) {
            chunks.find(args, stage, i, gridDim.x, count), index = 0;
            InputSlot(memory + place * InputSlot::BYTES).fetch(args, stage, chunks, index, warp, lane);
        }
        const bool another = index + 1 < InputChunks::COUNT && i + gridDim.x < count;
        const InputChunks::RowInfo& row_info = chunks.row_info[index];
        const Chunk chunk({0, row_info.first, row_info.rows, 0}, row_info.start, row_info.stop, lane);
        const u32 own = row_info.own();
        const float factors[2] = {chunks.factors[index][chunk.place], chunks.factors[index][chunk.place + 8]};
#pragma unroll 1
        for (u32 b = warp; b < blocks; b += warps) {
            const InputSlot slot(memory + place * InputSlot::BYTES), other(memory + (place ^ 1) * InputSlot::BYTES);
            const bool more = b + warps < blocks;
            if (more || another) {
                other.fetch(args, stage, chunks, more ? index : index + 1, more ? b + warps : warp, lane);
                cp_async_wait<1>();
            } else {
                cp_async_wait<0>();
            }
            __syncwarp();
            if (args.x_type == F16) slot.scale<F16>(factors, lane);
            else slot.scale<BF16>(factors, lane);
#pragma unroll 1
            for (u32 projection = 0; projection < own; ++projection) {
                float sums[8][2][4], stored[2];
                slot.rotate(sums, projection, signs, lane);
                rotate_rest(sums);
                store_rows(stored, chunk.group(args, stage, projection), chunk.k_block_bytes, sums, chunk.count, b, lane);
                chunk.keep(totals + projection * blocks * CHUNK_ROWS, stored, b, lane);
            }
            __syncwarp();  // others' copies of suh take the place of this one's
            place ^= 1;
        }
        __syncthreads();
        for (u32 j = 0; j < own; ++j) chunk.store_sums(args, stage, j, totals + j * blocks * CHUNK_ROWS);
        __syncthreads();  // shared memory is used again
    }
}

// Any input, element by element.
__device__ __forceinline__ void transform_any_inputs(const MoeArgs& args, const MoeStage& stage, const Signs& signs, InputChunks& chunks, float* totals) {
    const int lane = threadIdx.x & 31;
    const u32 blocks = stage.in_features / HADAMARD_SIZE, count = args.list_sizes[1];
#pragma unroll 1
    for (u32 i = blockIdx.x, index = InputChunks::COUNT; i < count; i += gridDim.x, ++index) {
        if (index == InputChunks::COUNT) chunks.find(args, stage, i, gridDim.x, count), index = 0;
        const InputChunks::RowInfo& row_info = chunks.row_info[index];
        const Chunk chunk({0, row_info.first, row_info.rows, 0}, row_info.start, row_info.stop, lane);
        const u32 own = row_info.own();
        i64 rows[2];
        float factors[2];
#pragma unroll
        for (u32 r = 0; r < 2; ++r)
            rows[r] = chunks.tokens[index][chunk.place + 8 * r] * args.x_stride, factors[r] = chunks.factors[index][chunk.place + 8 * r];
        ChunkInput input;
#pragma unroll 1
        for (u32 b = threadIdx.x / 32; b < blocks; b += blockDim.x / 32) {
            const u32 first = b * HADAMARD_SIZE + 8 * (lane & 3);
            input.load(args, rows, factors, first);
#pragma unroll 1
            for (u32 projection = 0; projection < own; ++projection) {
                float sums[8][2][4], stored[2];
                input.rotate(sums, stage.suh + row_info.suh[projection], first, signs);
                rotate_rest(sums);
                store_rows(stored, chunk.group(args, stage, projection), chunk.k_block_bytes, sums, chunk.count, b, lane);
                chunk.keep(totals + projection * blocks * CHUNK_ROWS, stored, b, lane);
            }
        }
        __syncthreads();
        for (u32 j = 0; j < own; ++j) chunk.store_sums(args, stage, j, totals + j * blocks * CHUNK_ROWS);
        __syncthreads();
    }
}

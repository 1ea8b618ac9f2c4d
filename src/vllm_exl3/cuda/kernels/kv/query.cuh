// The query rows of a block: rotated, as float16 in the order in which keys are unpacked.
#pragma once
#include "kv/arguments.cuh"
#include "kv/nibbles.cuh"

// `COUNT` elements at an even place, all loads at once.
template <int COUNT>
__device__ __forceinline__ void load_elements(float (&values)[COUNT], const void* base, i64 index, u32 type) {
    if (type == F32) {
        const float* from = static_cast<const float*>(base) + index;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) values[j] = from[j];
        return;
    }
    const u32* from = reinterpret_cast<const u32*>(static_cast<const u16*>(base) + index);
    u32 words[COUNT / 2];
#pragma unroll
    for (int j = 0; j < COUNT / 2; ++j) words[j] = from[j];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        const u32 bits = words[j / 2] >> 16 * (j & 1);
        values[j] = type == F16 ? half_to_float(u16(bits)) : __uint_as_float(bits << 16);
    }
}

// The elements of a block's query rows, 16 threads a row, 8 rows a tile.
template <class S>
struct KvQuery {
    static constexpr int COUNT = S::SIZE / 16;
    float values[S::TILES][COUNT];
    int position[S::TILES];

    __device__ __forceinline__ void load(const KvDecodeArgs& args, const KvWork& work) {
        const int part = threadIdx.x & 15;
#pragma unroll
        for (int tile = 0; tile < S::TILES; ++tile) {
            int token, query_head;
            const bool exists = work.row(args, 8 * tile + threadIdx.x / 16, S::ROWS, token, query_head);
            const i64 at = exists ? i64(work.start + token) * args.query_stride + query_head * S::SIZE : 0;
            load_elements(values[tile], args.query, at + part * COUNT, args.query_type);
            if (!exists) {
#pragma unroll
                for (int j = 0; j < COUNT; ++j) values[tile][j] = 0.0f;
            }
            position[tile] = exists ? work.context + token : -1;  // what does not exist sees nothing
        }
    }
};

// Rotates 8 rows and stores them in shared memory. A word of keys holds 8 elements; its pairs of nibbles (0,4), (1,5), (2,6),
// (3,7) meet queries in that order. Odd elements come 16 times too large, so their queries are a sixteenth.
template <class S>
__device__ __forceinline__ void rotate_query_tile(
    float (&v)[S::SIZE / 16], int position, const KvDecodeArgs& args, KvRows<S::ROWS>& rows, u8* shared, int tile) {
    constexpr int COUNT = S::SIZE / 16;
    const int thread = threadIdx.x, lane = thread & 31, part = thread & 15, row = 8 * tile + thread / 16;
#pragma unroll
    for (int j = 0; j < COUNT; ++j) v[j] *= args.signs[part * COUNT + j];
#pragma unroll
    for (int step = 1; step < COUNT; step *= 2)
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
            if (!(j & step)) {
                const float a = v[j], b = v[j + step];
                v[j] = a + b, v[j + step] = a - b;
            }
    float largest = 1e-30f;
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
#pragma unroll
        for (int step = 1; step < 16; step *= 2) v[j] = fmaf(part & step ? -1.0f : 1.0f, v[j], __shfl_xor_sync(0xffffffffu, v[j], step));
        largest = fmaxf(largest, fabsf(v[j]));
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    if (lane == 0) rows.largest[thread / 32] = largest;
    __syncthreads();
    largest = fmaxf(fmaxf(rows.largest[0], rows.largest[1]), fmaxf(rows.largest[2], rows.largest[3]));
    const float exponent = 8.0f - ceilf(log2f(largest)), unit = exp2f(exponent);
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        const int element = part * COUNT + j, word = element / 8, place = word % S::WORDS * 4 + word / S::WORDS, e = element & 7;
        u16 bits = float_to_half(v[j] * unit);
        if (j & 1) bits = float_to_half(half_to_float(bits) * 0.0625f), odd += half_to_float(bits);
        else even += half_to_float(bits);
        reinterpret_cast<u16*>(shared + S::QUERY_AT + row * S::QUERY_PITCH + place * 16)[2 * (e & 3) + e / 4] = bits;
    }
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
        even += __shfl_xor_sync(0xffffffffu, even, step);
        odd += __shfl_xor_sync(0xffffffffu, odd, step);
    }
    if (part == 0) {
        rows.raised[row] = -1024.0f * (even + odd), rows.sum[row] = fmaf(16.0f, odd, even);
        rows.unit[tile] = exp2f(-exponent), rows.position[row] = position;
        rows.old_top[row] = KV_LOWEST;
        for (int warp = 0; warp < KV_WARPS; ++warp) rows.tops[row][warp] = KV_LOWEST;
    }
    __syncthreads();  // `largest` is used again
}

template <class S>
__device__ __forceinline__ void rotate_queries(KvQuery<S>& query, const KvDecodeArgs& args, KvRows<S::ROWS>& rows, u8* shared) {
    if (threadIdx.x < 2) rows.changed[threadIdx.x] = 0;
#pragma unroll
    for (int tile = 0; tile < S::TILES; ++tile) rotate_query_tile<S>(query.values[tile], query.position[tile], args, rows, shared, tile);
}

// Adding up the segments that kv_decode left, and rotating the sum back: a block a query token and head.
//
// A row of `partial` holds element 4w + j at j·SIZE/4 + w. The transform is the same in every order of bits, so it works on
// places, and only signs and stores ask for elements.
#pragma once
#include "kv_decode_problem.cuh"
#include "kv_nibbles.cuh"
#include "launch.cuh"

// Mirrored by vllm_exl3/attention/native.py.
struct KvMergeArgs {
    KvDecodeArgs decode;
    const void* sinks;  // a logit of a key without a value for each query head, or null
    void* output;
    i64 output_stride;
    u32 rows, sink_type, output_type;
};

// Tops and weights of the segments, at most a thread each.
struct KvSegments {
    float weight[KV_THREADS];
    float partial[KV_WARPS];
};

__device__ __forceinline__ float block_sum(float value, float (&parts)[KV_WARPS]) {
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    return parts[0] + parts[1] + (parts[2] + parts[3]);
}
__device__ __forceinline__ float block_max(float value, float (&parts)[KV_WARPS]) {
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, mask));
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    return fmaxf(fmaxf(parts[0], parts[1]), fmaxf(parts[2], parts[3]));
}

template <int SIZE>
__device__ __forceinline__ void kv_merge(const KvMergeArgs& args) {
    constexpr int COUNT = SIZE / 32;
    const KvDecodeArgs& decode = args.decode;
    extern __shared__ __align__(16) u8 shared[];
    float* sums = reinterpret_cast<float*>(shared);  // [KV_WARPS][SIZE]
    KvSegments& segments = *reinterpret_cast<KvSegments*>(shared + 4 * KV_WARPS * SIZE);
    const u32 heads = decode.kv_heads * decode.group, query_head = blockIdx.x % heads, rest = blockIdx.x / heads;
    const u32 request = rest / decode.max_query, token = rest % decode.max_query;
    wait_for_previous();
    const int start = decode.starts[request], count = decode.starts[request + 1] - start, length = decode.lengths[request];
    if (count > int(decode.max_query) || int(token) >= count) return;

    // Where kv_decode put this row.
    const u32 block = token / decode.block_query, head = query_head / decode.group, in_group = query_head % decode.group;
    u32 row = token % decode.block_query * decode.group + in_group, program = head;
    if (decode.head_blocks > 1) row = in_group % args.rows, program = head * decode.head_blocks + in_group / args.rows;
    program += (request * decode.query_blocks + block) * decode.kv_heads * decode.head_blocks;
    const i64 first = i64(program) * decode.segments * args.rows + row;
    KvWork work;
    work.tiles(decode, length, length - count + int(block * decode.block_query));

    const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
    float top = KV_LOWEST, total = 0.0f;
    if (u32(thread) < decode.segments && work.some(decode, thread)) {
        const float* stats = decode.stats + 2 * (first + i64(thread) * args.rows);
        top = stats[0], total = stats[1];
    }
    const float highest = block_max(top, segments.partial), weight = power_of_two(top - highest);
    segments.weight[thread] = top > KV_LOWEST ? weight : 0.0f;
    float denominator = block_sum(total * weight, segments.partial);
    if (args.sinks) denominator += power_of_two(fmaf(load_element(args.sinks, query_head, args.sink_type), 1.4426950408889634f, -highest));

    float x[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) x[i] = 0.0f;
#pragma unroll 4
    for (u32 segment = warp; segment < decode.segments; segment += KV_WARPS) {
        const float by = segments.weight[segment];
        if (by == 0.0f) continue;  // what was not written may be no number
        const float* from = decode.partial + (first + i64(segment) * args.rows) * SIZE + lane;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) x[i] = fmaf(from[32 * i], by, x[i]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sums[warp * SIZE + 32 * i + lane] = x[i];
    __syncthreads();
    if (warp) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float* at = sums + 32 * i + lane;
        x[i] = at[0] + at[SIZE] + (at[2 * SIZE] + at[3 * SIZE]);
#pragma unroll
        for (int step = 1; step < 32; step *= 2) x[i] = fmaf(lane & step ? -1.0f : 1.0f, x[i], __shfl_xor_sync(0xffffffffu, x[i], step));
    }
#pragma unroll
    for (int step = 1; step < COUNT; step *= 2)
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (!(i & step)) {
                const float a = x[i], b = x[i + step];
                x[i] = a + b, x[i + step] = a - b;
            }
    const float factor = 1.0f / (denominator * SIZE);
    const i64 out = i64(start + token) * args.output_stride + query_head * SIZE;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int place = 32 * i + lane, element = place % (SIZE / 4) * 4 + place / (SIZE / 4);
        store_element(args.output, out + element, args.output_type, x[i] * factor * decode.signs[element]);
    }
}

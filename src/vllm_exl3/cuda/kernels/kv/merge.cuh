// Adding up the segments that kv_decode left, and rotating the sum back: a block a query token and head.
//
// A row of `partial` holds element 4w + j at j·SIZE/4 + w. The transform is the same in every order of bits, so it works on
// places, and only signs and stores ask for elements.
#pragma once
#include "kv/arguments.cuh"
#include "kv/nibbles.cuh"
#include "base/hadamard.cuh"
#include "base/launch.cuh"

struct KvMergeArgs {
    KvDecodeArgs decode;
    const void* sinks;  // a logit of a key without a value for each query head, or null
    void* output;
    i64 output_stride;
    u32 rows, sink_type, output_type;
};

constexpr int KV_MERGE_WARPS = 8, KV_MERGE_THREADS = 32 * KV_MERGE_WARPS;

struct KvSegments {
    float weight[KV_THREADS];  // of the segments, of which there are at most as many
    float parts[2][KV_MERGE_WARPS];
};

// Over the block, of every thread's value.
template <class F>
__device__ __forceinline__ float kv_reduce(float value, float (&parts)[KV_MERGE_WARPS], const F& function) {
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) value = function(value, __shfl_xor_sync(0xffffffffu, value, mask));
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    value = parts[0];
#pragma unroll
    for (int warp = 1; warp < KV_MERGE_WARPS; ++warp) value = function(value, parts[warp]);
    return value;
}

// A row of `partial`, and which segments of it were written.
struct KvRow {
    KvWork work;
    i64 first;
    int out_token;  // where the output goes

    // False where the token does not exist. Reads nothing that kv_decode writes.
    __device__ __forceinline__ bool find(const KvMergeArgs& args, u32 query_head, u32 request, u32 token) {
        const KvDecodeArgs& decode = args.decode;
        const int start = decode.starts[request], count = decode.starts[request + 1] - start, length = decode.lengths[request];
        if (count > int(decode.max_query) || int(token) >= count) return false;
        const u32 block = token / decode.block_query, head = query_head / decode.group, in_group = query_head % decode.group;
        u32 row = token % decode.block_query * decode.group + in_group, program = head;
        if (decode.head_blocks > 1) row = in_group % args.rows, program = head * decode.head_blocks + in_group / args.rows;
        program += (request * decode.query_blocks + block) * decode.kv_heads * decode.head_blocks;
        first = i64(program) * decode.segments * args.rows + row;
        out_token = start + int(token);
        work.tiles(decode, length, length - count + int(block * decode.block_query));
        return true;
    }
};

template <int SIZE>
__device__ __forceinline__ void kv_merge(const KvMergeArgs& args) {
    constexpr int COUNT = SIZE / 32, VECTOR = COUNT < 4 ? COUNT : 4;  // elements of a lane, and of one of its loads
    const KvDecodeArgs& decode = args.decode;
    extern __shared__ __align__(16) u8 shared[];
    float* sums = reinterpret_cast<float*>(shared);  // [KV_MERGE_WARPS][SIZE]
    KvSegments& segments = *reinterpret_cast<KvSegments*>(shared + 4 * KV_MERGE_WARPS * SIZE);
    const u32 heads = decode.kv_heads * decode.group, query_head = blockIdx.x % heads, rest = blockIdx.x / heads;
    launch_dependent_grids();
    KvRow row;
    const bool exists = row.find(args, query_head, rest / decode.max_query, rest % decode.max_query);
    wait_on_dependent_grids();
    if (!exists) return;

    const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
    float top = KV_LOWEST, total = 0.0f;
    if (u32(thread) < decode.segments && row.work.some(decode, thread)) {
        const float* stats = decode.stats + 2 * (row.first + i64(thread) * args.rows);
        top = stats[0], total = stats[1];
    }
    const float highest = kv_reduce(top, segments.parts[0], [](float a, float b) { return fmaxf(a, b); });
    const float weight = top > KV_LOWEST ? power_of_two(top - highest) : 0.0f;
    if (thread < KV_THREADS) segments.weight[thread] = weight;
    float denominator = kv_reduce(total * weight, segments.parts[1], [](float a, float b) { return a + b; });
    if (args.sinks) denominator += power_of_two(fmaf(load_element(args.sinks, query_head, args.sink_type), 1.4426950408889634f, -highest));

    float x[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) x[i] = 0.0f;
    const float* from = decode.partial + row.first * SIZE + VECTOR * lane;
    const i64 step = i64(args.rows) * SIZE;
#pragma unroll 4
    for (u32 segment = warp; segment < decode.segments; segment += KV_MERGE_WARPS) {
        const float by = segments.weight[segment];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            // What was not written may be no number.
            const float value = from[segment * step + i / VECTOR * VECTOR * 32 + i % VECTOR];
            x[i] = by > 0.0f ? fmaf(value, by, x[i]) : x[i];
        }
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sums[warp * SIZE + i / VECTOR * VECTOR * 32 + VECTOR * lane + i % VECTOR] = x[i];
    __syncthreads();
    if (warp) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float* at = sums + i / VECTOR * VECTOR * 32 + VECTOR * lane + i % VECTOR;
        x[i] = at[0];
#pragma unroll
        for (int other = 1; other < KV_MERGE_WARPS; ++other) x[i] += at[other * SIZE];
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) x[i] = fmaf(lane & mask ? -1.0f : 1.0f, x[i], __shfl_xor_sync(0xffffffffu, x[i], mask));
    }
    butterflies<1>(x);
    const float factor = 1.0f / (denominator * SIZE);
    const i64 out = i64(row.out_token) * args.output_stride + query_head * SIZE;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int place = i / VECTOR * VECTOR * 32 + VECTOR * lane + i % VECTOR, element = place % (SIZE / 4) * 4 + place / (SIZE / 4);
        store_element(args.output, out + element, args.output_type, x[i] * factor * decode.signs[element]);
    }
}

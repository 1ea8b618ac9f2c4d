// The end of a strip: pieces that several blocks computed are added in order, then H, svh, bias, cast and store.
//
// Every piece goes through global memory, also where a block has the strip for itself: the sums lie in fragment order, and the
// Hadamard transform wants 128 channels of a token in one warp. A fence and a counter would cost three trips to the L2 after the last
// product; words that are waited for themselves cost one. narrow_ends.cuh decides which block finishes what.
#pragma once
#include "narrow_products.cuh"
#include "store.cuh"

struct Strip {
    u32 shard, index;             // index: in the launch's list of strips
    u32 first_item, end_item;     // of the whole strip
    u32 channel;                  // first stored channel of the shard

    // The strip of an item of this shard or a later one.
    __device__ __forceinline__ void find(const NarrowArgs& args, u32 item, u32 channels) {
        while (item >= args.shards[shard].end_item) ++shard;
        const NarrowShard& at = args.shards[shard];
        const u32 local = over(item - at.first_item, at.depth_inverse);
        index = at.first_strip + local, channel = local * channels;
        first_item = at.first_item + local * at.depth, end_item = first_item + at.depth;
    }
};

constexpr u32 TURN_WORDS = 32;    // behind a piece; one says whether its block finishes a share of the strip

// A piece's number: strips and blocks are both in order, so this one is unique.
__device__ __forceinline__ u32 piece_of(u32 block, u32 strip) { return block + strip; }

template <int J>
__device__ __forceinline__ u64 piece_stride(const NarrowArgs& args, u32 tile_rows) {
    return static_cast<u64>(min(args.rows, tile_rows)) * (WARPS * J * 16) + TURN_WORDS;
}
template <int J>
__device__ __forceinline__ float* piece_at(const NarrowArgs& args, u32 piece, u32 tile_rows) {
    return args.partials + (blockIdx.y * static_cast<u64>(gridDim.x + args.total_strips) + piece) * piece_stride<J>(args, tile_rows);
}
template <int J>
__device__ __forceinline__ u32* turn_at(const NarrowArgs& args, u32 piece, u32 tile_rows) {
    return reinterpret_cast<u32*>(piece_at<J>(args, piece + 1, tile_rows)) - TURN_WORDS;
}

// What a word of a piece is until its sum arrives: a NaN that no arithmetic makes.
constexpr u32 MISSING = 0xffffffffu;

// Words of a piece are written and read without any order among them: one that is no longer MISSING is a sum.
__device__ __forceinline__ void store_sum(float* at, float value) {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(at), "f"(value) : "memory");
}
__device__ __forceinline__ float4 load_sums(const float4* at) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ bool any_missing(const float4& v) {
    return max(max(__float_as_uint(v.x), __float_as_uint(v.y)), max(__float_as_uint(v.z), __float_as_uint(v.w))) == MISSING;
}
__device__ __forceinline__ bool any_nan(const float4& v) {
    const float sum = (v.x + v.y) + (v.z + v.w);
    return sum != sum;
}

template <class K, int J>
__device__ __forceinline__ void store_piece(const NarrowArgs& args, const Totals<K> (&totals)[J], const Strip& strip, u32 warp, int lane) {
    using Tokens = LaneTokens<K>;
    const u32 rows = min(static_cast<u32>(K::tile_rows), args.rows - blockIdx.y * K::tile_rows);
    float* piece = piece_at<J>(args, piece_of(blockIdx.x, strip.index), K::tile_rows);
#pragma unroll
    for (int group = 0; group < K::columns; ++group) {
#pragma unroll
        for (int i = 0; i < Tokens::count; ++i) {
            const u32 token = Tokens::token_of(group, i, lane);
            if (token >= rows) continue;
            float* row = piece + token * (WARPS * J * 16) + warp * J * 16 + (lane >> 2);
#pragma unroll
            for (int tile = 0; tile < J; ++tile) {
                store_sum(row + 16 * tile, totals[tile][group][0][i]);
                store_sum(row + 16 * tile + 8, totals[tile][group][1][i]);
            }
        }
    }
}

// Whether a block finishes a share of a strip that it has a piece of: decided by the one that counted itself LAST, or by itself when it
// ends before that.
enum Turn : u32 { OPEN = MISSING, MINE = 1, LEFT = 2, LAST = 3 };

// A strip's tasks, each a token's Hadamard block for one warp: from `task` on, every `step`-th. Waits for sums that are missing, and
// leaves as soon as `turn` says that others do them.
template <int J, int TILE_ROWS>
__device__ __forceinline__ void finish_tasks(const NarrowArgs& args, const Strip& strip, u32 first, u32 count, u32 task, u32 step,
                                             const volatile u32* turn, int lane) {
    const NarrowShard& shard = args.shards[strip.shard];
    constexpr u32 channels = WARPS * J * 16;
    constexpr u32 AT_ONCE = 8;  // loads that overlap: what an exchange through the L2 costs is latency
    const u32 rows = min(static_cast<u32>(TILE_ROWS), args.rows - blockIdx.y * TILE_ROWS);
    const u32 blocks = min(channels, shard.out_features - strip.channel) / BLOCK, tasks = rows * blocks;
    const u64 stride = piece_stride<J>(args, TILE_ROWS) / 4;  // in float4
    const float* pieces = piece_at<J>(args, piece_of(first, strip.index), TILE_ROWS);
    for (; task < tasks; task += step) {
        const u32 token = quotient(task, blocks), channel = (task - token * blocks) * BLOCK + 4 * lane;
        const uint2 svh = *reinterpret_cast<const uint2*>(shard.svh + strip.channel + channel);
        const float4* from = reinterpret_cast<const float4*>(pieces + token * channels + channel);
        float4 total;
        bool missing;
        do {
            missing = false;
            if (turn != nullptr) {
                const u32 now = __shfl_sync(0xffffffffu, *turn, 0);
                if (now == LEFT) return;
                missing = now == OPEN;
            }
            total = {};
            for (u32 piece = 0; piece < count; piece += AT_ONCE) {
                float4 parts[AT_ONCE];
#pragma unroll
                for (u32 i = 0; i < AT_ONCE; ++i)
                    if (piece + i < count) parts[i] = load_sums(from + (piece + i) * stride);
#pragma unroll
                for (u32 i = 0; i < AT_ONCE; ++i)
                    if (piece + i < count) total.x += parts[i].x, total.y += parts[i].y, total.z += parts[i].z, total.w += parts[i].w;
                if (__builtin_expect(any_nan(total), 0)) {  // some are missing, or NaN
#pragma unroll
                    for (u32 i = 0; i < AT_ONCE; ++i)
                        if (piece + i < count) missing |= any_missing(parts[i]);
                }
            }
        } while (__any_sync(0xffffffffu, missing));
        store_token(args, shard, total, 1.0f, svh, strip.channel + channel, blockIdx.y * TILE_ROWS + token, lane);
    }
}

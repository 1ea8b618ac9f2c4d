// The end of an n tile: partial sums that several blocks computed are added in order, then H, svh, bias, cast and store.
//
// Every partial sum goes through global memory, also where a block has the n tile for itself: the sums lie in fragment order, and the
// Hadamard transform wants 128 channels of a token in one warp. A fence and a counter would cost three trips to the L2 after the last
// product; words that are waited for themselves cost one. narrow/reduction.cuh decides which block finishes what.
#pragma once
#include "narrow/products.cuh"
#include "base/store.cuh"

struct NTile {
    u32 shard, index;             // index: in the launch's list of n tiles
    u32 first_k_block, end_k_block;     // of the whole n tile
    u32 channel;                  // first stored channel of the shard

    // The n tile of a k block of this shard or a later one.
    __device__ __forceinline__ void find(const NarrowArgs& args, u32 k_block, u32 channels) {
        while (k_block >= args.shards[shard].end_k_block) ++shard;
        const NarrowShard& at = args.shards[shard];
        const u32 local = fast_divide(k_block - at.first_k_block, at.depth_inverse);
        index = at.first_n_tile + local, channel = local * channels;
        first_k_block = at.first_k_block + local * at.depth, end_k_block = first_k_block + at.depth;
    }
};

constexpr u32 ROLE_WORDS = 32;    // behind a partial sum; one is the block's role in the reduction of the n tile

// A partial sum's number: n tiles and blocks are both in order, so this one is unique.
__device__ __forceinline__ u32 partial_of(u32 block, u32 n_tile) { return block + n_tile; }

template <int J>
__device__ __forceinline__ u64 partial_stride(const NarrowArgs& args, u32 tile_rows) {
    return static_cast<u64>(min(args.rows, tile_rows)) * (WARPS * J * 16) + ROLE_WORDS;
}
template <int J>
__device__ __forceinline__ float* partial_at(const NarrowArgs& args, u32 partial, u32 tile_rows) {
    return args.partials + (blockIdx.y * static_cast<u64>(gridDim.x + args.n_tiles) + partial) * partial_stride<J>(args, tile_rows);
}
template <int J>
__device__ __forceinline__ u32* role_at(const NarrowArgs& args, u32 partial, u32 tile_rows) {
    return reinterpret_cast<u32*>(partial_at<J>(args, partial + 1, tile_rows)) - ROLE_WORDS;
}

// The value of a word of partial sums until its sum arrives: a NaN that no arithmetic makes.
constexpr u32 MISSING = 0xffffffffu;

// Words of a partial sum are written and read without any order among them: one that is no longer MISSING is a sum.
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
__device__ __forceinline__ void store_partial(const NarrowArgs& args, const Totals<K> (&totals)[J], const NTile& n_tile, u32 warp, int lane) {
    using Tokens = LaneTokens<K>;
    const u32 rows = min(static_cast<u32>(K::tile_rows), args.rows - blockIdx.y * K::tile_rows);
    float* partial = partial_at<J>(args, partial_of(blockIdx.x, n_tile.index), K::tile_rows);
#pragma unroll
    for (int group = 0; group < K::columns; ++group) {
#pragma unroll
        for (int i = 0; i < Tokens::count; ++i) {
            const u32 token = Tokens::token_of(group, i, lane);
            if (token >= rows) continue;
            float* row = partial + token * (WARPS * J * 16) + warp * J * 16 + (lane >> 2);
#pragma unroll
            for (int tile = 0; tile < J; ++tile) {
                store_sum(row + 16 * tile, totals[tile][group][0][i]);
                store_sum(row + 16 * tile + 8, totals[tile][group][1][i]);
            }
        }
    }
}

// The part of a block in the reduction of an n tile that it has partial sums of: decided by the block of the LAST_ARRIVAL, or by itself when it
// ends before that.
enum ReduceRole : u32 { UNDECIDED = MISSING, REDUCES = 1, EXITED = 2, LAST_ARRIVAL = 3 };

// An n tile's tasks, each a token's Hadamard block for one warp: from `task` on, every `step`-th. Waits for sums that are missing, and
// leaves as soon as `role` says that others do them.
template <int J, int TILE_ROWS>
__device__ __forceinline__ void reduce_tasks(const NarrowArgs& args, const NTile& n_tile, u32 first, u32 count, u32 task, u32 step,
                                             const volatile u32* role, int lane) {
    const NarrowShard& shard = args.shards[n_tile.shard];
    constexpr u32 channels = WARPS * J * 16;
    constexpr u32 AT_ONCE = 8;  // loads that overlap: what an exchange through the L2 costs is latency
    const u32 rows = min(static_cast<u32>(TILE_ROWS), args.rows - blockIdx.y * TILE_ROWS);
    const u32 blocks = min(channels, shard.out_features - n_tile.channel) / HADAMARD_SIZE, tasks = rows * blocks;
    const u64 stride = partial_stride<J>(args, TILE_ROWS) / 4;  // in float4
    const float* partials = partial_at<J>(args, partial_of(first, n_tile.index), TILE_ROWS);
    for (; task < tasks; task += step) {
        const u32 token = quotient(task, blocks), channel = (task - token * blocks) * HADAMARD_SIZE + 4 * lane;
        const uint2 svh = *reinterpret_cast<const uint2*>(shard.svh + n_tile.channel + channel);
        const float4* from = reinterpret_cast<const float4*>(partials + token * channels + channel);
        float4 total;
        bool missing;
        do {
            missing = false;
            if (role != nullptr) {
                const u32 now = __shfl_sync(0xffffffffu, *role, 0);
                if (now == EXITED) return;
                missing = now == UNDECIDED;
            }
            total = {};
            for (u32 partial = 0; partial < count; partial += AT_ONCE) {
                float4 loaded[AT_ONCE];
#pragma unroll
                for (u32 i = 0; i < AT_ONCE; ++i)
                    if (partial + i < count) loaded[i] = load_sums(from + (partial + i) * stride);
#pragma unroll
                for (u32 i = 0; i < AT_ONCE; ++i)
                    if (partial + i < count) total.x += loaded[i].x, total.y += loaded[i].y, total.z += loaded[i].z, total.w += loaded[i].w;
                if (__builtin_expect(any_nan(total), 0)) {  // some are missing, or NaN
#pragma unroll
                    for (u32 i = 0; i < AT_ONCE; ++i)
                        if (partial + i < count) missing |= any_missing(loaded[i]);
                }
            }
        } while (__any_sync(0xffffffffu, missing));
        store_token(args, shard, total, 1.0f, svh, n_tile.channel + channel, blockIdx.y * TILE_ROWS + token, lane);
    }
}

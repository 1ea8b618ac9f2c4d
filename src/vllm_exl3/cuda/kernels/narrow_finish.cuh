// The end of a strip: pieces that several blocks computed are added in order, then H, svh, bias, cast and store.
//
// Every piece goes through global memory, also where a block has the strip for itself: the sums lie in fragment order, and the
// Hadamard transform wants 128 channels of a token in one warp. The block that arrives last finishes the strip. A block shares at
// most the strips at the two ends of its range and arrives at both when all its work is done, so that it waits for memory once.
#pragma once
#include "barrier.cuh"
#include "narrow_products.cuh"
#include "store.cuh"

struct Strip {
    u32 shard, index;             // index: in the launch's list of strips
    u32 first_item, end_item;     // of the whole strip
    u32 channel;                  // first stored channel of the shard
};

// A piece's number: strips and blocks are both in order, so this one is unique.
__device__ __forceinline__ u32 piece_of(u32 block, u32 strip) { return block + strip; }

template <int J>
__device__ __forceinline__ u64 piece_stride(const NarrowArgs& args, u32 tile_rows) {
    return static_cast<u64>(min(args.rows, tile_rows)) * (WARPS * J * 16);
}
template <int J>
__device__ __forceinline__ float* piece_at(const NarrowArgs& args, u32 piece, u32 tile_rows) {
    return args.partials + (blockIdx.y * static_cast<u64>(gridDim.x + args.total_strips) + piece) * piece_stride<J>(args, tile_rows);
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
                __stcg(row + 16 * tile, totals[tile][group][0][i]);
                __stcg(row + 16 * tile + 8, totals[tile][group][1][i]);
            }
        }
    }
}

// Adds up and stores the tokens' Hadamard blocks of a strip, one a warp at a time.
template <int J, int TILE_ROWS>
__device__ __forceinline__ void finish_strip(const NarrowArgs& args, const Strip& strip, u32 first, u32 count, u32 warp, int lane) {
    const NarrowShard& shard = args.shards[strip.shard];
    constexpr u32 channels = WARPS * J * 16;
    constexpr u32 AT_ONCE = 8, TASKS = TILE_ROWS > 8 ? 2 : 1;  // loads that overlap: what an exchange through the L2 costs is latency
    const u32 rows = min(static_cast<u32>(TILE_ROWS), args.rows - blockIdx.y * TILE_ROWS);
    const u32 blocks = min(channels, shard.out_features - strip.channel) / BLOCK, tasks = rows * blocks;
    const u64 stride = piece_stride<J>(args, TILE_ROWS) / 4;  // in float4
    const float* pieces = piece_at<J>(args, piece_of(first, strip.index), TILE_ROWS);
    for (u32 task = warp; task < tasks; task += TASKS * WARPS) {
        float4 sums[TASKS] = {};
        uint2 svh[TASKS];
        const float4* from[TASKS];
#pragma unroll
        for (u32 t = 0; t < TASKS; ++t) {
            const u32 index = min(task + t * WARPS, tasks - 1), channel = remainder_of(index, blocks) * BLOCK + 4 * lane;
            svh[t] = *reinterpret_cast<const uint2*>(shard.svh + strip.channel + channel);
            from[t] = reinterpret_cast<const float4*>(pieces + quotient(index, blocks) * channels + channel);
        }
        for (u32 piece = 0; piece < count; piece += AT_ONCE) {
            float4 parts[TASKS][AT_ONCE];
#pragma unroll
            for (u32 t = 0; t < TASKS; ++t)
#pragma unroll
                for (u32 i = 0; i < AT_ONCE; ++i)
                    if (piece + i < count) parts[t][i] = __ldcg(from[t] + i * stride);
#pragma unroll
            for (u32 t = 0; t < TASKS; ++t) {
#pragma unroll
                for (u32 i = 0; i < AT_ONCE; ++i)
                    if (piece + i < count)
                        sums[t].x += parts[t][i].x, sums[t].y += parts[t][i].y, sums[t].z += parts[t][i].z, sums[t].w += parts[t][i].w;
                from[t] += AT_ONCE * stride;
            }
        }
#pragma unroll 1
        for (u32 t = 0; t < TASKS && task + t * WARPS < tasks; ++t) {
            const u32 index = task + t * WARPS, channel = remainder_of(index, blocks) * BLOCK + 4 * lane;
            store_token(args, shard, sums[0], 1.0f, svh[0], strip.channel + channel, blockIdx.y * TILE_ROWS + quotient(index, blocks), lane);
            if (TASKS > 1) sums[0] = sums[TASKS - 1], svh[0] = svh[TASKS - 1];
        }
    }
}

#if __CUDA_ARCH__ >= 900
// Where the blocks of a strip form a cluster, sums go straight to the shared memory of the block that finishes them, as [task of that
// block][block that they come from][channel]; a task is a token's Hadamard block. No memory fence, no counter, no trip to the L2.
struct TogetherTasks {
    u32 parts, shift, blocks;  // blocks of the cluster, log2 of those that finish tasks, Hadamard blocks of the strip

    template <int J>
    static __device__ __forceinline__ TogetherTasks of(const NarrowArgs& args, const Strip& strip) {
        const u32 channels = min(WARPS * J * 16, args.shards[strip.shard].out_features - strip.channel);
        return {args.parts, 31u - __clz(args.parts), channels / BLOCK};
    }
    __device__ __forceinline__ u32 owner(u32 task) const { return task & ((1u << shift) - 1); }
    __device__ __forceinline__ u32 place(u32 task, u32 block) const { return ((task >> shift) * parts + block) * (4 * BLOCK); }
};

template <class K, int J>
__device__ __forceinline__ void send_piece(const NarrowArgs& args, const Totals<K> (&totals)[J], const Strip& strip, u32 exchange, u32 warp,
                                           int lane) {
    using Tokens = LaneTokens<K>;
    const TogetherTasks tasks = TogetherTasks::of<J>(args, strip);
    const u32 rows = min(static_cast<u32>(K::tile_rows), args.rows - blockIdx.y * K::tile_rows);
    const u32 first = warp * J * 16, rank = rank_in_cluster();
#pragma unroll
    for (int group = 0; group < K::columns; ++group) {
#pragma unroll
        for (int i = 0; i < Tokens::count; ++i) {
            const u32 token = Tokens::token_of(group, i, lane);
            if (token >= rows) continue;
            const u32 task = token * tasks.blocks + first / BLOCK;
            const u32 to = shared_of(exchange + tasks.place(task, rank) + (first % BLOCK + (lane >> 2)) * 4, tasks.owner(task));
#pragma unroll
            for (int tile = 0; tile < J; ++tile) {
                store_remote(to + 64 * tile, totals[tile][group][0][i]);
                store_remote(to + 64 * tile + 32, totals[tile][group][1][i]);
            }
        }
    }
}

template <int J, int TILE_ROWS>
__device__ __forceinline__ void finish_together(const NarrowArgs& args, const Strip& strip, u32 exchange, u32 warp, int lane) {
    const NarrowShard& shard = args.shards[strip.shard];
    const TogetherTasks tasks = TogetherTasks::of<J>(args, strip);
    const u32 rows = min(static_cast<u32>(TILE_ROWS), args.rows - blockIdx.y * TILE_ROWS), rank = rank_in_cluster();
    const auto column_of = [&](u32 task) { return strip.channel + remainder_of(task, tasks.blocks) * BLOCK + 4 * lane; };
    const auto svh_of = [&](u32 task) { return *reinterpret_cast<const uint2*>(shard.svh + column_of(task)); };
    u32 task = warp << tasks.shift | rank;
    const bool finishes = rank < 1u << tasks.shift;
    uint2 svh{};
    if (finishes && task < rows * tasks.blocks) svh = svh_of(task);
    sync_cluster();
    if (!finishes) return;
    while (task < rows * tasks.blocks) {
        float4 sum = {};
        for (u32 block = 0; block < tasks.parts; ++block) {
            u32 part[4];
            SharedWords{exchange + tasks.place(task, block) + 16 * lane}.run(part, 0);
            sum.x += __uint_as_float(part[0]), sum.y += __uint_as_float(part[1]);
            sum.z += __uint_as_float(part[2]), sum.w += __uint_as_float(part[3]);
        }
        store_token(args, shard, sum, 1.0f, svh, column_of(task), blockIdx.y * TILE_ROWS + quotient(task, tasks.blocks), lane);
        task += WARPS << tasks.shift;
        if (task < rows * tasks.blocks) svh = svh_of(task);
    }
}
#endif

// A strip that a block shares: the first block of it, how many there are, and whether this one arrived last.
struct SharedStrip {
    Strip strip;
    u32 first, blocks;
    bool last;
};

// Counts an arrival, from 0 to `last` and then from 0 again; gives the count before.
__device__ __forceinline__ u32 arrive(u32* counter, u32 last) {
    u32 before;
    asm volatile("atom.acquire.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
    return before;
}

// The strips that a block has parts of. All threads of the block call its functions.
struct StripEnds {
    SharedStrip* ends;  // shared memory, for two
    u32 count = 0;

    // After a piece is stored: finishes the strip where the block has it for itself, else remembers it.
    template <int J, int TILE_ROWS>
    __device__ __forceinline__ void add(const NarrowArgs& args, const Strip& strip, u32 warp, int lane) {
        u32 first = blockIdx.x, blocks = args.parts;
        if (blocks) {
            first = over(first, args.parts_inverse) * blocks;
        } else {
            first = block_of_item(args, strip.first_item);
            blocks = block_of_item(args, strip.end_item - 1) - first + 1;
        }
        if (blocks > 1) {
            if (threadIdx.x == 0) ends[count] = {strip, first, blocks, false};
            ++count;
        } else {
            __syncthreads();
            finish_strip<J, TILE_ROWS>(args, strip, first, 1, warp, lane);
        }
    }

    template <int J, int TILE_ROWS>
    __device__ __forceinline__ void finish(const NarrowArgs& args, u32 warp, int lane) {
        if (count == 0) return;
        __syncthreads();
        if (threadIdx.x == 0) {
            asm volatile("fence.acq_rel.gpu;" ::: "memory");  // after the barrier it covers what the whole block wrote
            for (u32 i = 0; i < count; ++i) {
                // Wraps to zero at the last arrival: the counter is ready for the next launch.
                u32* counter = &args.counters[blockIdx.y * args.total_strips + ends[i].strip.index];
                ends[i].last = arrive(counter, ends[i].blocks - 1) == ends[i].blocks - 1;
            }
        }
        __syncthreads();
        for (u32 i = 0; i < count; ++i)
            if (ends[i].last) finish_strip<J, TILE_ROWS>(args, ends[i].strip, ends[i].first, ends[i].blocks, warp, lane);
    }
};

// The end of a strip: pieces that several blocks computed are added in order, then H, svh, bias, cast and store.
//
// Every piece goes through global memory, also where a block has the strip for itself: the sums lie in fragment order, and the
// Hadamard transform wants 128 channels of a token in one warp. The block that arrives last finishes the strip. A block shares at
// most the strips at the two ends of its range and arrives at both when all its work is done, so that it waits for memory once.
#pragma once
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
    constexpr u32 AT_ONCE = 8;  // loads that overlap: what an exchange through the L2 costs is latency
    const u32 rows = min(static_cast<u32>(TILE_ROWS), args.rows - blockIdx.y * TILE_ROWS);
    const u32 blocks = min(channels, shard.out_features - strip.channel) / BLOCK;
    const u64 stride = piece_stride<J>(args, TILE_ROWS) / 4;  // in float4
    for (u32 task = warp; task < rows * blocks; task += WARPS) {
        const u32 token = task / blocks, channel = task % blocks * BLOCK + 4 * lane;
        const uint2 svh = *reinterpret_cast<const uint2*>(shard.svh + strip.channel + channel);
        const float4* from = reinterpret_cast<const float4*>(piece_at<J>(args, piece_of(first, strip.index), TILE_ROWS) +
                                                             token * channels + channel);
        float4 sum = {};
        for (u32 piece = 0; piece < count; piece += AT_ONCE, from += AT_ONCE * stride) {
            float4 parts[AT_ONCE];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i)
                if (piece + i < count) parts[i] = __ldcg(from + i * stride);
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i)
                if (piece + i < count) sum.x += parts[i].x, sum.y += parts[i].y, sum.z += parts[i].z, sum.w += parts[i].w;
        }
        store_token(args, shard, sum, 1.0f, svh, strip.channel + channel, blockIdx.y * TILE_ROWS + token, lane);
    }
}

// A strip that a block shares: the first block of it, how many there are, and whether this one arrived last.
struct SharedStrip {
    Strip strip;
    u32 first, blocks;
    bool last;
};

// The strips that a block has parts of. All threads of the block call its functions.
struct StripEnds {
    SharedStrip* ends;  // shared memory, for two
    u32 count = 0;

    // After a piece is stored: finishes the strip where the block has it for itself, else remembers it.
    template <int J, int TILE_ROWS>
    __device__ __forceinline__ void add(const NarrowArgs& args, const Strip& strip, u32 warp, int lane) {
        u32 first = blockIdx.x, blocks = args.parts;
        if (blocks) {
            first -= first % blocks;
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
            __threadfence();  // after the barrier it covers what the whole block wrote
            for (u32 i = 0; i < count; ++i) {
                // Wraps to zero at the last arrival: the counter is ready for the next launch.
                u32* counter = &args.counters[blockIdx.y * args.total_strips + ends[i].strip.index];
                ends[i].last = atomicInc(counter, ends[i].blocks - 1) == ends[i].blocks - 1;
            }
            __threadfence();
        }
        __syncthreads();
        for (u32 i = 0; i < count; ++i)
            if (ends[i].last) finish_strip<J, TILE_ROWS>(args, ends[i].strip, ends[i].first, ends[i].blocks, warp, lane);
    }
};

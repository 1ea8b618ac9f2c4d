// The end of an n tile in the wide kernel: pairs and blocks are added up, and the n tile is stored. Included by wide/wide.cuh.
#pragma once

constexpr int CHUNK = 32;  // tokens whose outputs are in shared memory at once where the pairs hold two Hadamard blocks

template <int TOKENS, bool SPLIT_K>
constexpr u32 staging_bytes() {
    return (SPLIT_K ? TOKENS : 2 * CHUNK) * OUTPUT_PITCH * 4;
}

// Adds what all blocks of an n tile have, in the order of k, in the block that arrives last; elsewhere returns false.
template <int GROUPS>
__device__ __forceinline__ bool add_blocks(float4 (&sums)[GROUPS], WideBlock& block, const WideWorkTile& work) {
    const LinearArgs& args = block.args;
    const u32 first = range_of_k_block(args, work.n_tile_begin), last = range_of_k_block(args, work.n_tile_end - 1);
    const auto partials = [&](u32 from) {  // a block shares at most the n tiles at its two ends
        const u32 second = range_begin(args, from) < work.n_tile_begin ? 1 : 0;
        return reinterpret_cast<float4*>(args.partials) + threadIdx.x +
            static_cast<u64>(2 * (blockIdx.y * gridDim.x + from) + second) * args.partial_stride;
    };
    float4* mine = partials(blockIdx.x);
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) __stcg(mine + j * WIDE_THREADS, sums[j]);
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* counter = &args.counters[blockIdx.y * args.n_tiles + args.shards[work.shard].first_n_tile + work.n_tile];
        u32 before;
        asm volatile("fence.acq_rel.gpu;" ::: "memory");  // after the barrier it covers what the whole block wrote
        asm volatile("atom.acquire.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last - first) : "memory");
        *block.last = before == last - first;
    }
    __syncthreads();
    if (!*block.last) return false;
    constexpr u32 AT_ONCE = GROUPS > 8 ? 1 : 8 / GROUPS;  // blocks whose sums are on their way together
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) sums[j] = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (u32 from = first; from <= last; from += AT_ONCE) {
        float4 parts[AT_ONCE][GROUPS];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            if (from + i > last) continue;
            const float4* other = partials(from + i);
#pragma unroll
            for (int j = 0; j < GROUPS; ++j) parts[i][j] = __ldcg(other + j * WIDE_THREADS);
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            if (from + i > last) continue;
#pragma unroll
            for (int j = 0; j < GROUPS; ++j) {
                const float4& v = parts[i][j];
                sums[j].x += v.x, sums[j].y += v.y, sums[j].z += v.z, sums[j].w += v.w;
            }
        }
    }
    return true;
}

// Puts a thread's sums of 8 tokens, [token][channel], where whole warps read a token's channels.
__device__ __forceinline__ void stage(float* outputs, const float4& sum, int first_token, int pair_warp, int lane) {
    float* row = outputs + (first_token + 2 * (lane & 3)) * OUTPUT_PITCH + 16 * pair_warp + (lane >> 2);
    row[0] = sum.x, row[OUTPUT_PITCH] = sum.y, row[8] = sum.z, row[OUTPUT_PITCH + 8] = sum.w;
}

// Operands of the epilogue of an n tile, loaded before the sums are exchanged.
template <int TOKENS>
struct TileOutputs {
    uint2 svh;
    float descale[TOKENS / 32];  // of token lane, lane + 32, ... of the tile

    __device__ __forceinline__ TileOutputs(const WideBlock& block, const WideWorkTile& work, u32 column, u32 first_row, u32 rows) {
        const LinearArgs& args = block.args;
        const ShardArgs& shard = args.shards[work.shard];
        svh = column < shard.out_features ? *reinterpret_cast<const uint2*>(shard.svh + column) : make_uint2(0, 0);
#pragma unroll
        for (u32 i = 0; i < TOKENS / 32; ++i) {
            descale[i] = 0.0f;
            if (32 * i < rows) descale[i] = args.scales[work.shard * args.rows + first_row + min(32 * i + block.lane, rows - 1)];
        }
    }
    __device__ __forceinline__ float descale_of(u32 token) const {
        float mine = __shfl_sync(0xffffffffu, descale[0], token & 31);  // selecting before would put them in local memory
#pragma unroll
        for (u32 i = 1; i < TOKENS / 32; ++i) {
            const float other = __shfl_sync(0xffffffffu, descale[i], token & 31);
            if (token / 32 == i) mine = other;
        }
        return mine;
    }
};

// Stores `count` staged tokens from `first_token` of the tile on, of which this warp takes every `step`-th.
template <int TOKENS>
__device__ __forceinline__ void store_staged(const WideBlock& block, const WideWorkTile& work, const TileOutputs<TOKENS>& n_tile, const float* outputs,
                                             u32 column, u32 first_row, u32 first_token, u32 count, u32 first, u32 step) {
    const LinearArgs& args = block.args;
    const ShardArgs& shard = args.shards[work.shard];
    if (column >= shard.out_features) return;
    for (u32 token = first; token < count; token += step) {
        const float4 value = *reinterpret_cast<const float4*>(outputs + token * OUTPUT_PITCH + 4 * block.lane);
        const float descale = n_tile.descale_of(first_token + token);
        store_token(args, shard, value, descale, n_tile.svh, column, first_row + first_token + token, block.lane);
    }
}

template <int TOKENS, bool SPLIT_K>
__device__ __forceinline__ void finish_wide(float (&sums)[TOKENS / 2], WideBlock& block, const WideWorkTile& work) {
    const LinearArgs& args = block.args;
    const u32 first_row = blockIdx.y * args.tile_rows, rows = min(args.tile_rows, args.rows - first_row);
    const int pair_warp = block.warp % PAIR_WARPS;
    const auto group = [&](int j) { return make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]); };
    if constexpr (SPLIT_K) {
        // Each pair finishes half of the tokens: it gives the other its sums of the other half, and takes its own.
        constexpr int GROUPS = TOKENS / 16;
        const u32 thread = threadIdx.x % PAIR_THREADS, column = work.n_tile * HADAMARD_SIZE + 4 * block.lane;
        const TileOutputs<TOKENS> n_tile(block, work, column, first_row, rows);
        float4* exchange = reinterpret_cast<float4*>(block.staging);
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
            exchange[(block.pair * GROUPS + j) * PAIR_THREADS + thread] = block.pair ? group(j) : group(j + GROUPS);
        __syncthreads();
        float4 totals[GROUPS];
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
            const float4 mine = block.pair ? group(j + GROUPS) : group(j);
            const float4 other = exchange[((1 - block.pair) * GROUPS + j) * PAIR_THREADS + thread];
            totals[j] = make_float4(mine.x + other.x, mine.y + other.y, mine.z + other.z, mine.w + other.w);
        }
        if (!work.complete && !add_blocks(totals, block, work)) return;
        __syncthreads();  // the exchange has been read
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) stage(block.staging, totals[j], 8 * (block.pair * GROUPS + j), pair_warp, block.lane);
        __syncthreads();
        store_staged(block, work, n_tile, block.staging, column, first_row, 0, rows, threadIdx.x / 32, WIDE_THREADS / 32);
        __syncthreads();
    } else {
        const u32 column = (2 * work.n_tile + block.pair) * HADAMARD_SIZE + 4 * block.lane;
        const TileOutputs<TOKENS> n_tile(block, work, column, first_row, rows);
        float4 totals[TOKENS / 8];
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) totals[j] = group(j);
        if (!work.complete && !add_blocks(totals, block, work)) return;
        float* outputs = block.staging + block.pair * CHUNK * OUTPUT_PITCH;
#pragma unroll
        for (int chunk = 0; chunk < TOKENS / CHUNK; ++chunk) {
            if (chunk * CHUNK >= rows) break;
#pragma unroll
            for (int j = 0; j < CHUNK / 8; ++j) stage(outputs, totals[chunk * CHUNK / 8 + j], 8 * j, pair_warp, block.lane);
            __syncthreads();
            store_staged(block, work, n_tile, outputs, column, first_row, chunk * CHUNK, min(CHUNK, rows - chunk * CHUNK), pair_warp, PAIR_WARPS);
            __syncthreads();
        }
    }
}

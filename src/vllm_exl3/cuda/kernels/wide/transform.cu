// The input transform of every shard of a fused layer, for the wide kernel.
//
// Grid (parts, rows). Each of a row's `parts` blocks finds the row's scale by itself, which is cheaper than a second
// launch, and then writes only its own part, in the fragment order of wide/arguments.cuh.
#include "base/row_scale.cuh"

constexpr int TRANSFORM_THREADS = 896;  // 28 warps hold 112 blocks: 14336 channels
constexpr int TRANSFORM_WARPS = TRANSFORM_THREADS / 32;
constexpr int HELD = 4;  // 128-blocks whose loads a warp overlaps

// Stores the four values of a lane (k = 4·lane .. 4·lane+3 of a 128-block) in fragment order.
__device__ __forceinline__ void store_values(const float (&v)[4], float factor, u8* k_block, u32 stored_rows, u32 token, int lane) {
    const u32 q = lane >> 2 & 3, first = 4 * (lane & 3);  // k-tile in the k block, first k in the tile
    u32* words = reinterpret_cast<u32*>(k_block);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
        const u32 k = first + 2 * pair, matrix = 2 * (k >> 1 & 3) + (k >> 3);
        words[(matrix * stored_rows + token) * 4 + q] = half_pair(v[2 * pair] * factor, v[2 * pair + 1] * factor);
    }
}

extern "C" __global__ void __launch_bounds__(TRANSFORM_THREADS, 1) exl3_transform(const __grid_constant__ LinearArgs args) {
    __shared__ u32 largest[MAX_SHARDS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const u32 part = blockIdx.x, row = blockIdx.y, row_tile = row / args.tile_rows, token = row % args.tile_rows;
    launch_dependent_grids();
    if (threadIdx.x < MAX_SHARDS) largest[threadIdx.x] = 0;
    __syncthreads();
    wait_on_dependent_grids();
    for (u32 i = (row * args.transform_blocks + part) * TRANSFORM_THREADS + threadIdx.x; i < args.n_tiles * args.row_tiles;
         i += args.rows * args.transform_blocks * TRANSFORM_THREADS)
        args.counters[i] = 0;
    Batch<HELD> batch;
    for (u32 s = 0; s < args.shard_count; ++s) {
        const ShardArgs& shard = args.shards[s];
        const u32 blocks = shard.in_features / HADAMARD_SIZE, begin = part * blocks / args.transform_blocks, end = (part + 1) * blocks / args.transform_blocks;
        // Warp w has blocks w, w + TRANSFORM_WARPS, …; one batch of them stays in registers where that is all.
        const bool held = blocks <= HELD * TRANSFORM_WARPS;
        u32 bits = 0;
        for (u32 first = warp; first < blocks; first += HELD * TRANSFORM_WARPS) {
            batch.load(args, shard, false, lane, [&](int i) {
                return BatchPlace{row, first + i * TRANSFORM_WARPS, first + i * TRANSFORM_WARPS < blocks};
            });
#pragma unroll
            for (int i = 0; i < HELD; ++i)
                if (first + i * TRANSFORM_WARPS < blocks) bits = max(bits, magnitude_bits(batch.v[i]));
        }
        bits = __reduce_max_sync(0xffffffffu, bits);
        if (lane == 0) atomicMax(&largest[s], bits);
        __syncthreads();
        const RowScale scale = row_scale(HALF, largest[s]);
        if (part == 0 && threadIdx.x == 0) args.scales[s * args.rows + row] = scale.descale;
        const u32 k_block_bytes = k_block_activation_bytes(args.stored_rows);
        u8* target = args.activations + static_cast<u64>(shard.activation_block) * 16 +
            static_cast<u64>(row_tile * 2 * blocks) * k_block_bytes;
        for (u32 first = held ? warp : begin + warp; first < end; first += HELD * TRANSFORM_WARPS) {
            if (!held)
                batch.load(args, shard, true, lane, [&](int i) {
                    return BatchPlace{row, first + i * TRANSFORM_WARPS, first + i * TRANSFORM_WARPS < end};
                });
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                const u32 block = first + i * TRANSFORM_WARPS, k_block = 2 * block + (lane >> 4);
                if (block < begin || block >= end) continue;
                if (held) hadamard128(batch.v[i], lane);
                store_values(batch.v[i], scale.factor, target + static_cast<u64>(k_block) * k_block_bytes, args.stored_rows, token, lane);
            }
        }
    }
}

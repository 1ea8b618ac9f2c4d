// The input transform of every shard of a fused layer, for the wide kernel.
//
// Grid (parts, rows). Each of a row's `parts` blocks finds the row's scale by itself, which is cheaper than a second
// launch, and then writes only its own part, in the fragment order of wide/arguments.cuh.
#include "base/row_scale.cuh"
#include "wide/arguments.cuh"

constexpr int TRANSFORM_THREADS = 896;  // 28 warps hold 112 blocks: 14336 channels
constexpr int TRANSFORM_WARPS = TRANSFORM_THREADS / 32;
constexpr int HELD = 4;  // 128-blocks whose loads a warp overlaps

// Up to HELD 128-blocks of a shard's rows, whose loads overlap. `place(i)` says which: {row, block, exists}.
template <int HELD>
struct Batch {
    float v[HELD][4];  // the lane's channels 4·lane .. 4·lane+3

    // x·suh, and with `rotate` H(x·suh) unscaled.
    template <class Place>
    __device__ __forceinline__ void load(const LinearArgs& args, const ShardArgs& shard, bool rotate, int lane, const Place& place) {
        const bool fast = args.x_type != F32 && (args.in_width | args.x_stride) % 4 == 0 && reinterpret_cast<u64>(args.x) % 8 == 0;
        uint2 scales[HELD], raw[HELD] = {};
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const auto at = place(i);
            if (!at.exists) continue;
            const u32 column = at.block * HADAMARD_SIZE + 4 * lane;
            scales[i] = *reinterpret_cast<const uint2*>(shard.suh + column);
            const u16* x = static_cast<const u16*>(args.x) + at.row * args.x_stride + column;
            if (fast && column < args.in_width) raw[i] = *reinterpret_cast<const uint2*>(x);
        }
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const auto at = place(i);
            if (!at.exists) continue;
            const u16 bits[4] = {u16(raw[i].x), u16(raw[i].x >> 16), u16(raw[i].y), u16(raw[i].y >> 16)};
            const u16 suh[4] = {u16(scales[i].x), u16(scales[i].x >> 16), u16(scales[i].y), u16(scales[i].y >> 16)};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                v[i][j] = args.x_type == F16 ? half_to_float(bits[j]) : __uint_as_float(u32(bits[j]) << 16);
            if (!fast) load_any(v[i], args, at.row, at.block * HADAMARD_SIZE + 4 * lane);
#pragma unroll
            for (int j = 0; j < 4; ++j) v[i][j] *= half_to_float(suh[j]);
            if (rotate) hadamard128(v[i], lane);
        }
    }

private:
    // Any dtype, alignment and width.
    static __device__ __forceinline__ void load_any(float (&v)[4], const LinearArgs& args, u32 row, u32 column) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            v[j] = column + j < args.in_width ? load_element(args.x, row * args.x_stride + column + j, args.x_type) : 0.0f;
    }
};

struct BatchPlace {
    u32 row, block;
    bool exists;
};

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

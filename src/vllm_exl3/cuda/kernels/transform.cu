// The input transform of every shard of a fused layer: A = H(x·suh)/sqrt(128), brought to the form the GEMM multiplies.
//
// Grid (parts, rows). A row's scale needs its largest |A|: each of the row's `parts` blocks finds it by itself (cheaper
// than a second launch) and then writes only its own part.
//   INTEGER:    a15 = round(A·16256/max|A|) as two int8 planes, a15 = 128·high + low, each repeated over four bytes
//   PAIR, HALF: fp16, the row scaled by a power of two so that 2^10 <= max|A| < 2^11; PAIR repeats it in both halves
// It also zeroes the counters of the GEMM that follows.
#include "hadamard.cuh"
#include "problem.cuh"

constexpr int TRANSFORM_THREADS = 512;
constexpr int TRANSFORM_WARPS = TRANSFORM_THREADS / 32;
constexpr float LARGEST = 16256.0f;  // 127·128

__device__ __forceinline__ void transform_block(float (&v)[4], const LinearArgs& args, const ShardArgs& shard, u32 row, u32 block,
                                                int lane) {
    const u32 column = block * STRIP + 4 * lane;
    const uint2 packed = *reinterpret_cast<const uint2*>(shard.suh + column);
    const i64 at = row * args.x_stride + column;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = column + i < args.in_width ? load_element(args.x, at + i, args.x_type) : 0.0f;
    v[0] *= half_to_float(u16(packed.x)), v[1] *= half_to_float(u16(packed.x >> 16));
    v[2] *= half_to_float(u16(packed.y)), v[3] *= half_to_float(u16(packed.y >> 16));
    hadamard128(v, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= HADAMARD_SCALE;
}

// A power of two as float bits such that |value| of at most `largest` becomes less than 2^11.
__device__ __forceinline__ u32 power_scale(float largest) {
    const u32 exponent = max(1u, __float_as_uint(largest) >> 23 & 0xffu);
    return min(264u - exponent, 253u);
}

// Stores the four values of a lane (k = 4·lane .. 4·lane+3 of a 128-block) in fragment order; returns their sum.
__device__ __forceinline__ int store_values(const float (&v)[4], float factor, u8* unit_base, const ShardArgs& shard, u32 stored_rows,
                                            u32 token, int lane) {
    const u32 q = lane >> 2 & 3, first = 4 * (lane & 3);  // k-tile in the unit, first k in the tile
    u32* words = reinterpret_cast<u32*>(unit_base);
    if (shard.arithmetic == 2 /* HALF */) {
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const u32 k = first + 2 * pair, matrix = 2 * (k >> 1 & 3) + (k >> 3);
            words[(matrix * stored_rows + token) * 4 + q] =
                float_to_half(v[2 * pair] * factor) | u32(float_to_half(v[2 * pair + 1] * factor)) << 16;
        }
        return 0;
    }
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 k = first + i, matrix = ((k >> 1 & 3) * 2 + (k >> 3)) * 2 + (k & 1);
        if (shard.arithmetic == 1 /* PAIR */) {
            words[(matrix * stored_rows + token) * 4 + q] = float_to_half(v[i] * factor) * 0x10001u;
        } else {
            const int a = __float2int_rn(v[i] * factor), high = (a + 64) >> 7, low = a - 128 * high;
            u32* row = words + (matrix * stored_rows + token) * 8 + q;
            row[0] = (u32(high) & 0xffu) * 0x01010101u;
            row[4] = (u32(low) & 0xffu) * 0x01010101u;
            sum += a;
        }
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(TRANSFORM_THREADS, 2) exl3_transform(const __grid_constant__ LinearArgs args) {
    __shared__ float warp_largest[TRANSFORM_WARPS];
    __shared__ int warp_sums[TRANSFORM_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const u32 part = blockIdx.x, row = blockIdx.y;
    let_next_start();
    wait_for_previous();
    for (u32 i = (row * args.parts + part) * TRANSFORM_THREADS + threadIdx.x; i < args.total_strips;
         i += args.rows * args.parts * TRANSFORM_THREADS)
        args.counters[i] = 0;
    for (u32 s = 0; s < args.shard_count; ++s) {
        const ShardArgs& shard = args.shards[s];
        const u32 blocks = shard.in_features / STRIP;
        float v[4], largest = 0.0f;
        for (u32 block = warp; block < blocks; block += TRANSFORM_WARPS) {
            transform_block(v, args, shard, row, block, lane);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // A NaN must survive the maximum, so that the row comes out as NaN and not as something plausible.
                const float magnitude = fabsf(v[i]);
                largest = magnitude <= largest ? largest : magnitude;
            }
        }
#pragma unroll
        for (int step = 16; step; step /= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, largest, step);
            largest = other <= largest ? largest : other == other && largest != largest ? largest : other;
        }
        if (lane == 0) warp_largest[warp] = largest;
        __syncthreads();
        largest = 0.0f;
#pragma unroll
        for (int i = 0; i < TRANSFORM_WARPS; ++i) {
            const float other = warp_largest[i];
            largest = other <= largest || largest != largest ? largest : other;
        }
        float factor, undo;
        if (shard.arithmetic == 0 /* INTEGER */) {
            factor = largest > 0.0f ? LARGEST / largest : 0.0f;
            undo = largest / LARGEST;
            if (factor > 3.0e38f) factor = 0.0f, undo = 0.0f;  // a row of subnormals is zero
        } else {
            const u32 exponent = power_scale(largest);
            factor = __uint_as_float(exponent << 23), undo = __uint_as_float((254u - exponent) << 23);
            if (!(largest <= 3.4e38f)) undo = largest;
        }
        if (part == 0 && threadIdx.x == 0) args.scales[s * args.rows + row] = undo;

        const u32 unit_bytes = unit_activation_bytes(shard.arithmetic, args.stored_rows);
        const u32 row_tile = row / args.tile_rows, token = row % args.tile_rows;
        u8* target = args.activations + static_cast<u64>(shard.activation_block) * 16 +
            static_cast<u64>(row_tile) * (2 * blocks) * unit_bytes;
        int sum = 0;
        for (u32 block = part * blocks / args.parts + warp; block < (part + 1) * blocks / args.parts; block += TRANSFORM_WARPS) {
            transform_block(v, args, shard, row, block, lane);
            sum += store_values(v, factor, target + static_cast<u64>(2 * block + (lane >> 4)) * unit_bytes, shard, args.stored_rows,
                                token, lane);
        }
        if (shard.arithmetic == 0 /* INTEGER */) {
            sum = __reduce_add_sync(0xffffffffu, sum);
            if (lane == 0) warp_sums[warp] = sum;
            __syncthreads();
            if (threadIdx.x == 0) {
                int total = 0;
                for (int i = 0; i < TRANSFORM_WARPS; ++i) total += warp_sums[i];
                args.sums[(s * args.rows + row) * args.parts + part] = total;
            }
        }
        __syncthreads();
    }
}

// The input side of prefill: A = H(x·suh)/sqrt(128) of every row and shard in fp16, scaled by a power of two a row, in the
// order in which wgmma reads it as its B operand.
//
// Grid (parts, groups of 8 rows); the `parts` blocks of a group divide k. From sm_90 on they form a cluster and tell each
// other the largest values of their parts; before, each searches the whole rows.
#include "barrier.cuh"
#include "prefill_problem.cuh"
#include "rotation.cuh"

constexpr int TRANSFORM_THREADS = 512, TRANSFORM_WARPS = TRANSFORM_THREADS / 32, GROUP = 8;
constexpr int PIECE = 16;  // consecutive channels of a lane: one k-tile

// x·suh of 8 consecutive channels.
__device__ __forceinline__ void load_scaled(float (&v)[8], const PrefillArgs& args, const u16* suh, u32 row, u32 column, bool fast) {
    const uint4 scales = *reinterpret_cast<const uint4*>(suh + column);
    const u32 scale_words[4] = {scales.x, scales.y, scales.z, scales.w};
    if (fast && column < args.in_width) {
        const uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const u16*>(args.x) + row * args.x_stride + column);
        const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u16 low = u16(words[i]), high = u16(words[i] >> 16);
            v[2 * i] = args.x_type == F16 ? half_to_float(low) : __uint_as_float(u32(low) << 16);
            v[2 * i + 1] = args.x_type == F16 ? half_to_float(high) : __uint_as_float(u32(high) << 16);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            v[i] = column + i < args.in_width ? load_element(args.x, row * args.x_stride + column + i, args.x_type) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[2 * i] *= half_to_float(u16(scale_words[i]));
        v[2 * i + 1] *= half_to_float(u16(scale_words[i] >> 16));
    }
}

// Lane q of four gets word q of each of them, in the order of the lanes.
__device__ __forceinline__ uint4 transpose_words(u32 a, u32 b, u32 c, u32 d, int lane) {
    const bool odd = lane & 1, high = lane & 2;
    const u32 from_pair0 = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1), from_pair1 = __shfl_xor_sync(0xffffffffu, odd ? c : d, 1);
    if (odd) a = from_pair0, c = from_pair1;
    else b = from_pair0, d = from_pair1;
    const u32 from_half0 = __shfl_xor_sync(0xffffffffu, high ? a : c, 2), from_half1 = __shfl_xor_sync(0xffffffffu, high ? b : d, 2);
    if (high) a = from_half0, b = from_half1;
    else c = from_half0, d = from_half1;
    return make_uint4(a, b, c, d);
}

// H over 128 values, 16 consecutive ones in each of 8 neighbouring lanes; unscaled.
__device__ __forceinline__ void hadamard_pieces(float (&v)[PIECE], int lane) {
#pragma unroll
    for (int step = 1; step < PIECE; step *= 2)
#pragma unroll
        for (int i = 0; i < PIECE; ++i)
            if (!(i & step)) {
                const float a = v[i], b = v[i + step];
                v[i] = a + b, v[i + step] = a - b;
            }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
        const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < PIECE; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xffffffffu, v[i], step));
    }
}

__device__ __forceinline__ u32 load_rank(const u32* value, u32 rank) {
    u32 found = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %1, %2;\n"
        "ld.shared::cluster.u32 %0, [remote];\n"
        "}\n" : "=r"(found) : "r"(shared_address(value)), "r"(rank) : "memory");
#endif
    return found;
}

extern "C" __global__ void __launch_bounds__(TRANSFORM_THREADS, 2) exl3_prefill_transform(const __grid_constant__ PrefillArgs args) {
    __shared__ u32 largest[MAX_SHARDS][GROUP];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const u32 part = blockIdx.x, parts = gridDim.x, first_row = blockIdx.y * GROUP, rows = min(u32(GROUP), args.rows - first_row);
    const u32 blocks = args.in_features / STRIP, begin = part * blocks / parts, end = (part + 1) * blocks / parts;
    const bool fast = args.x_type != F32 && (args.in_width | args.x_stride) % 8 == 0 && reinterpret_cast<u64>(args.x) % 16 == 0;
    let_next_start();
    if (threadIdx.x < MAX_SHARDS * GROUP) largest[threadIdx.x / GROUP][threadIdx.x % GROUP] = 0;
    __syncthreads();
    wait_for_previous();
    for (u32 i = (blockIdx.y * parts + part) * TRANSFORM_THREADS + threadIdx.x; i < args.counter_count;
         i += gridDim.y * parts * TRANSFORM_THREADS)
        args.counters[i] = 0;

    // Two warps a row search for the largest |x·suh|.
    const u32 searched_row = warp % GROUP;
    const bool alone = __CUDA_ARCH__ < 900;
    const u32 search_begin = (alone ? 0 : begin) * STRIP, search_end = (alone ? blocks : end) * STRIP;
    for (u32 s = 0; s < args.shard_count && searched_row < rows; ++s) {
        u32 bits = 0;
#pragma unroll 4
        for (u32 column = search_begin + (warp / GROUP * 32 + lane) * 8; column < search_end; column += TRANSFORM_WARPS / GROUP * 256) {
            float v[8];
            load_scaled(v, args, args.shards[s].suh, first_row + searched_row, column, fast);
#pragma unroll
            for (int i = 0; i < 8; ++i) bits = max(bits, __float_as_uint(fabsf(v[i])));
        }
        bits = __reduce_max_sync(0xffffffffu, bits);
        if (lane == 0) atomicMax(&largest[s][searched_row], bits);
    }
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    u32 found = 0;
    sync_cluster();
    if (threadIdx.x < args.shard_count * GROUP)
        for (u32 rank = 0; rank < parts; ++rank) found = max(found, load_rank(&largest[0][0] + threadIdx.x, rank));
    sync_cluster();
    if (threadIdx.x < args.shard_count * GROUP) (&largest[0][0])[threadIdx.x] = found;
    __syncthreads();
#endif

    // A warp rotates one 128-block of four rows at a time.
    const u32 group_row = 4 * (warp & 1) + (lane >> 3), row = first_row + group_row;
    const u32 row_tile = row / args.tile_rows, token = row % args.tile_rows, unit_bytes = args.tile_rows * 128, piece = lane & 7, q = lane & 3;
    const bool exists = group_row < rows;
    for (u32 s = 0; s < args.shard_count; ++s) {
        const RowScale scale = row_scale(HALF, largest[s][group_row]);
        if (exists && part == 0 && warp < 2 && piece == 0) args.scales[s * args.rows + row] = scale.undo;
        u8* tile = args.activations + static_cast<u64>(s * args.row_tiles + row_tile) * (2 * blocks) * unit_bytes;
#pragma unroll 2
        for (u32 block = begin + warp / 2; block < end; block += TRANSFORM_WARPS / 2) {
            float v[PIECE], halves[2][8] = {};
            if (exists) {
                const u32 column = block * STRIP + piece * PIECE;
                load_scaled(halves[0], args, args.shards[s].suh, row, column, fast);
                load_scaled(halves[1], args, args.shards[s].suh, row, column + 8, fast);
            }
#pragma unroll
            for (int i = 0; i < PIECE; ++i) v[i] = halves[i / 8][i % 8];
            hadamard_pieces(v, lane);
            u32 words[8];  // of matrix 0..7: pair p of k lies in matrix 2·(p & 3) + (p >> 2)
#pragma unroll
            for (int p = 0; p < 8; ++p) words[2 * (p & 3) + (p >> 2)] = half_pair(v[2 * p] * scale.factor, v[2 * p + 1] * scale.factor);
            const uint4 low = transpose_words(words[0], words[1], words[2], words[3], lane);
            const uint4 high = transpose_words(words[4], words[5], words[6], words[7], lane);
            if (!exists) continue;
            uint4* unit = reinterpret_cast<uint4*>(tile + static_cast<u64>(2 * block + (piece >> 2)) * unit_bytes);
            unit[q * args.tile_rows + token] = low;
            unit[(q + 4) * args.tile_rows + token] = high;
        }
    }
}

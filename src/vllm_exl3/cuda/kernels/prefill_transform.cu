// The input side of prefill: A = H(x·suh)/sqrt(128) of every row and shard in fp16, scaled by a power of two a row, in the
// order in which wgmma reads it as its B operand.
//
// Grid (parts, groups of 8 rows); the `parts` blocks of a group divide k. From sm_90 on they form a cluster and tell each
// other the largest values of their parts; before, each searches the whole rows. A warp rotates one 128-block of four rows at
// a time, 16 consecutive channels a lane. Rows stay in registers from the search to the rounding where HELD blocks a warp
// suffice, which the host sees to for up to 16384 channels.
#include "barrier.cuh"
#include "prefill_problem.cuh"
#include "rotation.cuh"

constexpr int TRANSFORM_THREADS = 512, COLUMNS = TRANSFORM_THREADS / 64, GROUP = 8;
constexpr int HELD = 2, PASS = HELD * COLUMNS;  // 128-blocks of a warp, and of the block, that are worked on at once
constexpr int PIECE = 16;  // consecutive channels of a lane: one k-tile

template <int VALUE> struct Index { static constexpr int value = VALUE; };

struct Pieces {
    uint4 raw[HELD][2];  // x as stored, where it is of 16 bits

    __device__ __forceinline__ void load(const PrefillArgs& args, u32 row, u32 block, u32 end, int piece, bool exists) {
#pragma unroll
        for (int i = 0; i < HELD; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 at = block + i * COLUMNS, column = at * STRIP + piece * PIECE + 8 * half;
                raw[i][half] = make_uint4(0, 0, 0, 0);
                if (exists && at < end && column < args.in_width)
                    raw[i][half] = *reinterpret_cast<const uint4*>(static_cast<const u16*>(args.x) + row * args.x_stride + column);
            }
    }
    // x·suh of the lane's piece of block I, which begins at `column`.
    template <int I>
    __device__ __forceinline__ void scaled(float (&v)[PIECE], const PrefillArgs& args, const u16* suh, u32 row, u32 column, bool exists,
                                           bool fast) const {
        if (fast) {
            const u32 words[8] = {raw[I][0].x, raw[I][0].y, raw[I][0].z, raw[I][0].w, raw[I][1].x, raw[I][1].y, raw[I][1].z, raw[I][1].w};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                v[2 * i] = args.x_type == F16 ? half_to_float(u16(words[i])) : __uint_as_float(words[i] << 16);
                v[2 * i + 1] = args.x_type == F16 ? half_to_float(u16(words[i] >> 16)) : __uint_as_float(words[i] & 0xffff0000u);
            }
        } else {
#pragma unroll
            for (int i = 0; i < PIECE; ++i)
                v[i] = exists && column + i < args.in_width ? load_element(args.x, row * args.x_stride + column + i, args.x_type) : 0.0f;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 scales = *reinterpret_cast<const uint4*>(suh + column + 8 * half);
            const u32 words[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                v[8 * half + 2 * i] *= half_to_float(u16(words[i]));
                v[8 * half + 2 * i + 1] *= half_to_float(u16(words[i] >> 16));
            }
        }
    }
};

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

// Rotates a piece, rounds it and stores it in the order of wgmma; `tile` is where the row tile's units begin.
__device__ __forceinline__ void store_piece(float (&v)[PIECE], float factor, u8* tile, u32 tile_rows, u32 block, u32 token, bool exists,
                                            int lane) {
    const u32 q = lane & 3, piece = lane & 7;
    hadamard_pieces(v, lane);
    u32 words[8];  // of matrix 0..7: pair p of k lies in matrix 2·(p & 3) + (p >> 2)
#pragma unroll
    for (int p = 0; p < 8; ++p) words[2 * (p & 3) + (p >> 2)] = half_pair(v[2 * p] * factor, v[2 * p + 1] * factor);
    const uint4 low = transpose_words(words[0], words[1], words[2], words[3], lane);
    const uint4 high = transpose_words(words[4], words[5], words[6], words[7], lane);
    if (!exists) return;
    uint4* unit = reinterpret_cast<uint4*>(tile + static_cast<u64>(2 * block + (piece >> 2)) * (tile_rows * 128));
    unit[q * tile_rows + token] = low;
    unit[(q + 4) * tile_rows + token] = high;
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
    __shared__ u32 largest[MAX_SHARDS][GROUP], row_largest[MAX_SHARDS][GROUP];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, piece = lane & 7;
    const u32 part = blockIdx.x, parts = gridDim.x, blocks = args.in_features / STRIP;
    const u32 begin = part * blocks / parts, end = (part + 1) * blocks / parts;
    const u32 group_row = 4 * (warp & 1) + (lane >> 3), row = blockIdx.y * GROUP + group_row;
    const bool exists = row < args.rows, alone = __CUDA_ARCH__ < 900;
    const bool fast = args.x_type != F32 && (args.in_width | args.x_stride) % 8 == 0 && reinterpret_cast<u64>(args.x) % 16 == 0;
    const bool held = end - begin <= PASS && !(alone && parts > 1);
    let_next_start();
    if (threadIdx.x < MAX_SHARDS * GROUP) (&largest[0][0])[threadIdx.x] = 0;
    __syncthreads();
    wait_for_previous();
    for (u32 i = (blockIdx.y * parts + part) * TRANSFORM_THREADS + threadIdx.x; i < args.counter_count;
         i += gridDim.y * parts * TRANSFORM_THREADS)
        args.counters[i] = 0;

    Pieces pieces;
    const u32 search_begin = alone ? 0 : begin, search_end = alone ? blocks : end;
    for (u32 first = search_begin + warp / 2; first < search_end; first += PASS) {
        if (fast) pieces.load(args, row, first, search_end, piece, exists);
        for (u32 s = 0; s < args.shard_count; ++s) {
            u32 bits = 0;
            const auto search = [&](auto index) {
                constexpr int I = decltype(index)::value;
                const u32 block = first + I * COLUMNS;
                if (block >= search_end) return;
                float v[PIECE];
                pieces.scaled<I>(v, args, args.shards[s].suh, row, block * STRIP + piece * PIECE, exists, fast);
#pragma unroll
                for (int i = 0; i < PIECE; ++i) bits = max(bits, __float_as_uint(fabsf(v[i])));
            };
            search(Index<0>{}), search(Index<1>{});
#pragma unroll
            for (int step = 1; step < 8; step *= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, step));
            if (piece == 0) atomicMax(&largest[s][group_row], bits);
        }
    }
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    sync_cluster();
#endif
    if (threadIdx.x < args.shard_count * GROUP) {
        u32 found = (&largest[0][0])[threadIdx.x];
        if (!alone)
            for (u32 rank = 0; rank < parts; ++rank) found = max(found, load_rank(&largest[0][0] + threadIdx.x, rank));
        (&row_largest[0][0])[threadIdx.x] = found;
    }
    __syncthreads();

    const u32 row_tile = row / args.tile_rows, token = row % args.tile_rows;
    for (u32 first = begin + warp / 2; first < end; first += PASS) {
        if (fast && !held) pieces.load(args, row, first, end, piece, exists);
        for (u32 s = 0; s < args.shard_count; ++s) {
            const RowScale scale = row_scale(HALF, row_largest[s][group_row]);
            if (exists && part == 0 && first == 0 && piece == 0) args.scales[s * args.rows + row] = scale.undo;
            u8* tile = args.activations + static_cast<u64>(s * args.row_tiles + row_tile) * (2 * blocks) * (args.tile_rows * 128);
            const auto store = [&](auto index) {
                constexpr int I = decltype(index)::value;
                const u32 block = first + I * COLUMNS;
                if (block >= end) return;
                float v[PIECE];
                pieces.scaled<I>(v, args, args.shards[s].suh, row, block * STRIP + piece * PIECE, exists, fast);
                store_piece(v, scale.factor, tile, args.tile_rows, block, token, exists, lane);
            };
            store(Index<0>{}), store(Index<1>{});
        }
    }
#if __CUDA_ARCH__ >= 900
    sync_cluster();  // nobody leaves while others read its values
#endif
}

// The input side of prefill: A = H(x·suh)/sqrt(128) of every row and shard in fp16, scaled by a power of two a row, in the
// order in which wgmma reads it as its B operand. Two kernels: rows' scales, then everything else, at the speed of memory.
//
// A warp rotates one 128-block of four rows at a time, 16 consecutive channels a lane.
#include "prefill_pieces.cuh"
#include "rotation.cuh"

constexpr int ROW_THREADS = 256;
constexpr int TRANSFORM_THREADS = 256, COLUMNS = TRANSFORM_THREADS / 64, GROUP = 8;  // rows of a block; warps side by side along k
constexpr int HELD = 2, PASS = HELD * COLUMNS;  // 128-blocks of a warp, whose loads overlap, and of the block

// Rotates a piece, rounds it and stores it in the order of wgmma; `tile` is where the row tile's units begin.
__device__ __forceinline__ void store_piece(float (&v)[PIECE], float factor, u8* tile, u32 tile_rows, u32 block, u32 token, bool exists,
                                            int lane) {
    const u32 q = lane & 3, piece = lane & 7;
    hadamard_pieces(v, lane);
    u32 words[8];  // of matrix 0..7: pair p of k lies in matrix 2·(p & 3) + (p >> 2)
#pragma unroll
    for (int p = 0; p < 8; ++p) 
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[2 * (p & 3) + (p >> 2)]) : "f"(v[2 * p + 1] * factor), "f"(v[2 * p] * factor));
    const uint4 low = transpose_words(words[0], words[1], words[2], words[3], lane);
    const uint4 high = transpose_words(words[4], words[5], words[6], words[7], lane);
    if (!exists) return;
    uint4* unit = reinterpret_cast<uint4*>(tile + static_cast<u64>(2 * block + (piece >> 2)) * (tile_rows * 128));
    unit[q * tile_rows + token] = low;
    unit[(q + 4) * tile_rows + token] = high;
}

// Grid (rows): finds what each row of every shard is scaled by, from its largest |x·suh|, and zeroes the counters.
extern "C" __global__ void __launch_bounds__(ROW_THREADS) exl3_prefill_rows(const __grid_constant__ PrefillArgs args) {
    __shared__ u32 largest[MAX_SHARDS];
    const u32 row = blockIdx.x;
    const bool fast = loads_vectors(args);
    let_next_start();
    if (threadIdx.x < MAX_SHARDS) largest[threadIdx.x] = 0;
    __syncthreads();
    wait_for_previous();
    for (u32 i = row * ROW_THREADS + threadIdx.x; i < args.counter_count; i += gridDim.x * ROW_THREADS) args.counters[i] = 0;
    for (u32 s = 0; s < args.shard_count; ++s) {
        const u16* suh = args.shards[s].suh;
        u32 bits = 0;
        if (fast) {
#pragma unroll 4
            for (u32 column = 8 * threadIdx.x; column < args.in_width; column += 8 * ROW_THREADS) {
                float x[8], scales[8];
                unpack(x, *reinterpret_cast<const uint4*>(static_cast<const u16*>(args.x) + row * args.x_stride + column), args.x_type);
                unpack(scales, *reinterpret_cast<const uint4*>(suh + column), F16);
#pragma unroll
                for (int i = 0; i < 8; ++i) bits = max(bits, __float_as_uint(fabsf(x[i] * scales[i])));
            }
        } else {
            for (u32 column = threadIdx.x; column < args.in_width; column += ROW_THREADS)
                bits = max(bits, __float_as_uint(fabsf(load_element(args.x, row * args.x_stride + column, args.x_type) * half_to_float(suh[column]))));
        }
        bits = __reduce_max_sync(0xffffffffu, bits);
        if (threadIdx.x % 32 == 0) atomicMax(&largest[s], bits);
    }
    __syncthreads();
    if (threadIdx.x < args.shard_count) {
        const RowScale scale = row_scale(HALF, largest[threadIdx.x]);
        args.scales[threadIdx.x * args.rows + row] = scale.undo;
        args.scales[(args.shard_count + threadIdx.x) * args.rows + row] = scale.factor;
    }
}

// Grid (shards × parts of k, groups of 8 rows).
extern "C" __global__ void __launch_bounds__(TRANSFORM_THREADS, 4) exl3_prefill_transform(const __grid_constant__ PrefillArgs args) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, piece = lane & 7;
    const u32 blocks = args.in_features / STRIP, parts = (blocks + PASS - 1) / PASS, s = blockIdx.x / parts;
    const u32 first = blockIdx.x % parts * PASS + warp / 2;
    const u32 row = blockIdx.y * GROUP + 4 * (warp & 1) + (lane >> 3);
    const bool exists = row < args.rows, fast = loads_vectors(args);
    let_next_start();
    wait_for_previous();
    uint4 raw[HELD][2];
#pragma unroll
    for (int i = 0; i < HELD; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 block = first + i * COLUMNS, column = block * STRIP + piece * PIECE + 8 * half;
            raw[i][half] = make_uint4(0, 0, 0, 0);
            if (fast && exists && block < blocks && column < args.in_width)
                raw[i][half] = *reinterpret_cast<const uint4*>(static_cast<const u16*>(args.x) + row * args.x_stride + column);
        }
    const float factor = exists ? args.scales[(args.shard_count + s) * args.rows + row] : 0.0f;
    const u32 row_tile = row / args.tile_rows, token = row % args.tile_rows;
    u8* tile = args.activations + static_cast<u64>(s * args.row_tiles + row_tile) * (2 * blocks) * (args.tile_rows * 128);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const u32 block = first + i * COLUMNS;
        if (block >= blocks) break;
        float v[PIECE];
        load_piece(v, args, raw[i], args.shards[s].suh, row, block * STRIP + piece * PIECE, exists, fast);
        store_piece(v, factor, tile, args.tile_rows, block, token, exists, lane);
    }
}

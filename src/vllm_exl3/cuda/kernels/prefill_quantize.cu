// The input side of prefill's fast mode: A = H(x·suh)/sqrt(128) of every row and shard in int8, a scale a row, in the order in
// which wgmma reads it as its B operand; prefill_int8.cuh says how k is permuted. A block rotates a whole row and keeps it in
// registers until its largest magnitude is known, so that x is read once.
#include "hadamard.cuh"
#include "prefill_pieces.cuh"

constexpr int MOST_THREADS = 1024;
constexpr int HELD = 2;  // pieces of a thread; rows have at most HELD·PIECE·MOST_THREADS channels
constexpr float LARGEST_BYTE = 127.0f;
constexpr float STEP = 4.0f * 1774 / 262144;  // of a weight: 4·k_inv

// Four values times `factor`, rounded to int8: adding 1.5·2^23 leaves the integer in the lowest bits of the sum.
__device__ __forceinline__ u32 pack_bytes(float a, float b, float c, float d, float factor) {
    const float values[4] = {a, b, c, d};
    u32 rounded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) rounded[i] = __float_as_uint(fmaf(values[i], factor, 12582912.0f));
    return __byte_perm(__byte_perm(rounded[0], rounded[1], 0x0040), __byte_perm(rounded[2], rounded[3], 0x0040), 0x5410);
}

// Grid (rows, shards).
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1) exl3_prefill_quantize(const __grid_constant__ PrefillArgs args) {
    __shared__ u32 largest;
    const u32 row = blockIdx.x, s = blockIdx.y, pieces = args.in_features / PIECE, units = args.in_features / UNIT_IN;
    const int lane = threadIdx.x & 31;
    const bool fast = loads_vectors(args);
    let_next_start();
    if (threadIdx.x == 0) largest = 0;
    __syncthreads();
    wait_for_previous();
    float v[HELD][PIECE];
    u32 bits = 0;
    uint4 raw[HELD][2];
#pragma unroll
    for (int i = 0; i < HELD; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 column = (threadIdx.x + i * blockDim.x) * PIECE + 8 * half;
            raw[i][half] = make_uint4(0, 0, 0, 0);
            if (fast && column < args.in_width)
                raw[i][half] = *reinterpret_cast<const uint4*>(static_cast<const u16*>(args.x) + row * args.x_stride + column);
        }
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const u32 piece = threadIdx.x + i * blockDim.x;  // 8 neighbours are one 128-block: all of them exist, or none
        load_piece(v[i], args, raw[i], args.shards[s].suh, row, min(piece, pieces - 1) * PIECE, piece < pieces, fast);
        hadamard_pieces(v[i], lane);
#pragma unroll
        for (int j = 0; j < PIECE; ++j)
            if (piece < pieces) bits = max(bits, __float_as_uint(fabsf(v[i][j])));
    }
    bits = __reduce_max_sync(0xffffffffu, bits);
    if (lane == 0) atomicMax(&largest, bits);
    __syncthreads();
    const float most = __uint_as_float(largest);
    // A row of zeros or subnormals gives zeros; one with a NaN or an infinity comes out as such, by its scale.
    const float factor = most >= 1.0e-36f ? LARGEST_BYTE / most : 0.0f;
    if (threadIdx.x == 0) args.scales[s * args.rows + row] = most * (HADAMARD_SCALE * STEP / LARGEST_BYTE);
    const u32 row_tile = row / args.tile_rows, token = row % args.tile_rows;
    uint4* tile = reinterpret_cast<uint4*>(args.activations) + static_cast<u64>(s * args.row_tiles + row_tile) * units * (args.tile_rows * 4) + token;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const u32 piece = threadIdx.x + i * blockDim.x;
        u32 words[4];
#pragma unroll
        for (int m = 0; m < 4; ++m)
            words[m] = pack_bytes(v[i][2 * m], v[i][2 * m + 1], v[i][2 * m + 8], v[i][2 * m + 9], factor);
        const uint4 matrix = transpose_words(words[0], words[1], words[2], words[3], lane);
        if (piece < pieces) tile[(piece / 4 * 4 + (piece & 3)) * args.tile_rows] = matrix;
    }
}

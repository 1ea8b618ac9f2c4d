// The input side of prefill's fast mode: A = H(x·suh)/sqrt(128) of every row and shard in int8, a scale a row, in the order in
// which wgmma reads it as its B operand; prefill/int8.cuh says how k is permuted.
//
// A block has a few whole rows, a thread one k block of one of them: it keeps it in registers, rotated, until the row's largest
// magnitude is known. So x is read once.
#include "base/cp_async.cuh"
#include "base/hadamard.cuh"
#include "prefill/row_slice.cuh"

constexpr int MOST_THREADS = 512, MOST_ROWS = 4;

// Four values times `factor`, rounded to int8: adding 1.5·2^23 leaves the integer in the lowest bits of the sum.
__device__ __forceinline__ u32 pack_bytes(float a, float b, float c, float d, float factor) {
    const float values[4] = {a, b, c, d};
    u32 rounded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) rounded[i] = __float_as_uint(fmaf(values[i], factor, 12582912.0f));
    return __byte_perm(__byte_perm(rounded[0], rounded[1], 0x0040), __byte_perm(rounded[2], rounded[3], 0x0040), 0x5410);
}

__device__ __forceinline__ void store_bytes(const RowSlice& slice, const float (&v)[BLOCK_K], const PrefillArgs& args, u32 shard, float factor) {
    const u32 k_blocks = args.in_features / BLOCK_K, row_tile = slice.row / args.tile_rows, token = slice.row % args.tile_rows;
    uint4* to = reinterpret_cast<uint4*>(args.activations) +
        (static_cast<u64>(shard * args.row_tiles + row_tile) * k_blocks + slice.k_block) * (args.tile_rows * 4) + token;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 words[4];  // of k-tile 0..3
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
            const float* of = v + 16 * tile + 2 * i;
            words[tile] = pack_bytes(of[0], of[1], of[8], of[9], factor);
        }
        to[i * args.tile_rows] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Grid (groups of args.block_rows rows, shards); as many threads as the rows have k blocks, rounded up to warps.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1) exl3_prefill_quantize(const __grid_constant__ PrefillArgs args) {
    extern __shared__ __align__(16) u8 rows[];
    __shared__ u32 largest[MOST_ROWS];
    const bool in_shared = loads_vectors(args);
    const u32 s = blockIdx.y;
    launch_dependent_grids();
    if (threadIdx.x < MOST_ROWS) largest[threadIdx.x] = 0;
    wait_on_dependent_grids();
    if (in_shared) load_rows_to_shared(args, rows);
    cp_async_wait_all();
    __syncthreads();
    const RowSlice slice(args, threadIdx.x);
    float v[BLOCK_K];
    slice.load(v, args, rows, args.shards[s].suh, in_shared);
    slice.rotate(v);
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < int(BLOCK_K); ++i) most = larger(most, v[i]);
    // Lanes of one row: pairs of neighbours, every block_rows'th pair.
    u32 bits = __float_as_uint(most);
    bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 1));
    for (u32 lanes = 2 * args.block_rows; lanes < 32; lanes *= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, lanes));
    if ((threadIdx.x & 31) < 2 * args.block_rows && (threadIdx.x & 1) == 0) atomicMax(&largest[slice.in_block], bits);
    __syncthreads();
    if (!slice.exists) return;
    most = __uint_as_float(largest[slice.in_block]);
    // A row of zeros or subnormals gives zeros; one with a NaN or an infinity comes out as such, by its scale.
    const float factor = most >= 1.0e-36f ? LARGEST_BYTE / most : 0.0f;
    if (slice.k_block == 0) args.scales[s * args.rows + slice.row] = most * (HADAMARD_SCALE * BYTE_STEP / LARGEST_BYTE);
    store_bytes(slice, v, args, s, factor);
}

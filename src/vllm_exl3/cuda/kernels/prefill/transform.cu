// The input side of prefill: A = H(x·suh)/sqrt(128) of every row and shard in fp16, scaled by a power of two a row, in the
// order in which wgmma reads it as its B operand.
//
// A block has a few whole rows, since what a row is scaled by depends on all of it. They come to shared memory once and are
// read twice, for the scale and to be rotated. A lane has 32 consecutive channels of a row, four neighbours a 128-block: with
// 64, which need one exchange less, registers keep so few warps that nobody hides their latencies.
#include "base/cp_async.cuh"
#include "prefill/row_slice.cuh"
#include "base/row_scale.cuh"

constexpr int MOST_THREADS = 512, MOST_ROWS = 16, PART = 32;
constexpr u32 PARTS = HADAMARD_SIZE / PART;  // of a 128-block

// From row to row in shared memory: what keeps eight lanes' reads, of one or two rows, free of bank conflicts.
__device__ __forceinline__ u32 shared_pitch(const PrefillArgs& args) { return args.in_features / BLOCK_K * BLOCK_K_PITCH / 128 * 128 + 128 + 32; }

// Part `part` of the row `row`, which is the block's row `in_block`.
struct Part {
    u32 row, in_block, part;
    bool exists;

    __device__ __forceinline__ Part(const PrefillArgs& args, u32 index) {
        const u32 group = index / PARTS;
        in_block = group % args.block_rows, row = blockIdx.x * args.block_rows + in_block;
        part = PARTS * (group / args.block_rows) + index % PARTS;
        exists = row < args.rows && part < args.in_features / PART;
    }
    __device__ __forceinline__ u32 place() const { return part / 2 * BLOCK_K_PITCH + part % 2 * (2 * PART); }  // in a row in shared memory

    // x·suh, of which `rows` and `suh` are in shared memory.
    __device__ __forceinline__ void load_from_shared(float (&v)[PART], const PrefillArgs& args, const u8* rows, const u8* suh) const {
        const uint4* raw = reinterpret_cast<const uint4*>(rows + in_block * shared_pitch(args) + place());
        const uint4* scales = reinterpret_cast<const uint4*>(suh + place());
#pragma unroll
        for (int i = 0; i < PART / 8; ++i) {
            float x[8] = {}, factors[8] = {};
            if (exists) unpack(x, raw[i], args.x_type), unpack(factors, scales[i], F16);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[8 * i + j] = x[j] * factors[j];
        }
    }
    // The same from memory, for any type and alignment.
    __device__ __forceinline__ void load(float (&v)[PART], const PrefillArgs& args, const u16* suh) const {
#pragma unroll
        for (int i = 0; i < PART; ++i) {
            const u32 column = part * PART + i;
            v[i] = exists && column < args.in_width
                ? load_element(args.x, row * args.x_stride + column, args.x_type) * half_to_float(suh[column]) : 0.0f;
        }
    }
    // H over the 128-block; unscaled.
    __device__ __forceinline__ void rotate(float (&v)[PART]) const {
        butterflies<1>(v);
#pragma unroll
        for (u32 lanes = 1; lanes < PARTS; lanes *= 2) {
            const float sign = part & lanes ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < PART; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xffffffffu, v[i], lanes));
        }
    }
    // Rounds it and stores it: two of the four k-tiles of a k block.
    __device__ __forceinline__ void store(const float (&v)[PART], const PrefillArgs& args, u32 shard, float factor) const {
        const bool complements = args.shards[shard].complements;
        ComplementSum sum;
        const u32 k_blocks = args.in_features / BLOCK_K, row_tile = row / args.tile_rows, token = row % args.tile_rows;
        uint4* k_block = reinterpret_cast<uint4*>(args.activations) +
            (static_cast<u64>(shard * args.row_tiles + row_tile) * k_blocks + part / 2) * (args.tile_rows * 8) + token;
        uint2* to = reinterpret_cast<uint2*>(k_block) + part % 2;
#pragma unroll
        for (int matrix = 0; matrix < 8; ++matrix) {
            u32 words[2];  // of each k-tile: matrix m has its pair m/2 + 4·(m % 2)
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const float* pair = v + 16 * tile + 2 * (matrix / 2) + 8 * (matrix % 2);
                asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[tile]) : "f"(pair[1] * factor), "f"(pair[0] * factor));
                if (complements) {
                    const u32 k = operand_channel(matrix), flips = u32(complemented(k)) << 15 | u32(complemented(k + 1)) << 31;
                    sum.add(words[tile], flips);
                    words[tile] ^= flips;
                }
            }
            if (exists) to[2 * matrix * args.tile_rows] = make_uint2(words[0], words[1]);
        }
        if (!complements) return;
        float offset = sum.offset();
#pragma unroll
        for (u32 lanes = 1; lanes < PARTS; lanes *= 2) offset += __shfl_xor_sync(0xffffffffu, offset, lanes);
        if (exists && part % PARTS == 0)
            args.offsets[static_cast<u64>(shard * args.rows + row) * (args.in_features / HADAMARD_SIZE) + part / PARTS] = offset;
    }
};

// Grid (groups of args.block_rows rows).
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 2) exl3_prefill_transform(const __grid_constant__ PrefillArgs args) {
    extern __shared__ __align__(16) u8 rows[];  // with args.holds, the block's rows, and behind them the shard's suh
    __shared__ u32 largest[MAX_SHARDS][MOST_ROWS];
    const bool in_shared = args.rows_in_shared && loads_vectors(args);
    const u32 parts = args.block_rows * (args.in_features / PART), in_block = threadIdx.x / PARTS % args.block_rows;
    const u32 row = blockIdx.x * args.block_rows + in_block;
    const bool first_of_row = threadIdx.x % 32 < PARTS * args.block_rows && threadIdx.x % PARTS == 0;  // in its warp
    u8* suh = rows + args.block_rows * shared_pitch(args);
    const auto load = [&](float(&v)[PART], const Part& part, u32 s) {
        if (in_shared) part.load_from_shared(v, args, rows, suh);
        else part.load(v, args, args.shards[s].suh);
    };
    launch_dependent_grids();
    for (u32 i = threadIdx.x; i < MAX_SHARDS * MOST_ROWS; i += blockDim.x) largest[i / MOST_ROWS][i % MOST_ROWS] = 0;
    if (in_shared) load_suh_to_shared(args, 0, suh);  // weights never change; x is written by the kernel ahead
    wait_on_dependent_grids();
    if (blockIdx.x == 0) clear_arrivals(args);
    if (in_shared) load_rows_to_shared(args, rows, shared_pitch(args));
#pragma unroll 1
    for (u32 s = 0; s < args.shard_count; ++s) {
        cp_async_wait_all();
        __syncthreads();
        // All parts of a thread are of one row; a warp goes through its parts together.
        float most[4] = {};  // chains that do not wait for each other
#pragma unroll 1
        for (u32 i = threadIdx.x; i - threadIdx.x % 32 < parts; i += blockDim.x) {
            float v[PART];
            load(v, Part(args, i), s);
#pragma unroll
            for (int j = 0; j < PART; ++j) most[j % 4] = larger(most[j % 4], v[j]);
        }
        u32 bits = __float_as_uint(larger(larger(most[0], most[1]), larger(most[2], most[3])));
        for (u32 lanes = 1; lanes < 32; lanes *= 2)
            if (lanes < PARTS || lanes >= PARTS * args.block_rows) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, lanes));
        if (first_of_row) atomicMax(&largest[s][in_block], bits);
        __syncthreads();
        const RowScale scale = row_scale(HALF, largest[s][in_block]);
        if (first_of_row && threadIdx.x < PARTS * args.block_rows && row < args.rows) args.scales[s * args.rows + row] = scale.descale;
#pragma unroll 1
        for (u32 i = threadIdx.x; i - threadIdx.x % 32 < parts; i += blockDim.x) {
            const Part part(args, i);
            float v[PART];
            load(v, part, s);
            part.rotate(v);
            part.store(v, args, s, scale.factor);
        }
        if (!in_shared || s + 1 == args.shard_count) continue;
        __syncthreads();
        load_suh_to_shared(args, s + 1, suh);
    }
}

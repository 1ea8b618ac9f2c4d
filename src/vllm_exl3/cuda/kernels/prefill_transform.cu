// The input side of prefill: A = H(x·suh)/sqrt(128) of every row and shard in fp16, scaled by a power of two a row, in the
// order in which wgmma reads it as its B operand.
//
// A block has a few whole rows, since what a row is scaled by depends on all of it. They come to shared memory once and are
// read twice, for the scale and to be rotated. A lane has 64 consecutive channels of a row, a unit, which is what lies together
// in the result, and its neighbour the other half of their 128-block: one step of the transform crosses lanes.
#include "prefill_pieces.cuh"
#include "rotation.cuh"

constexpr int MOST_THREADS = 512, MOST_ROWS = 16;
constexpr u32 UNIT_PITCH = 2 * UNIT_IN + 16;  // bytes of a row's unit in shared memory, padded against bank conflicts

__device__ __forceinline__ u32 row_pitch(const PrefillArgs& args) {
    return args.in_features / UNIT_IN * UNIT_PITCH / 128 * 128 + 128 + (args.block_rows == 2 ? 64 : 32);
}

// The largest magnitude; a NaN is above all, so that its row comes out as NaN and not as something plausible.
__device__ __forceinline__ float larger(float most, float value) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(most), "f"(fabsf(value)));
    return result;
}

// What a thread rotates: unit `unit` of the row `row`, which is the block's row `in_block`.
struct Item {
    u32 row, in_block, unit;
    bool exists;

    __device__ __forceinline__ Item(const PrefillArgs& args, u32 index) {
        const u32 pair = index >> 1;
        in_block = pair % args.block_rows, row = blockIdx.x * args.block_rows + in_block;
        unit = 2 * (pair / args.block_rows) + (index & 1);
        exists = row < args.rows && unit < args.in_features / UNIT_IN;
    }
    // x·suh. `held`: the block's rows are in shared memory.
    __device__ __forceinline__ void load(float (&v)[UNIT_IN], const PrefillArgs& args, const u8* rows, const u16* suh, bool held) const {
        if (!exists) {
#pragma unroll
            for (int i = 0; i < int(UNIT_IN); ++i) v[i] = 0.0f;
            return;
        }
        const uint4* scales = reinterpret_cast<const uint4*>(suh + unit * UNIT_IN);
        if (held) {
            const uint4* raw = reinterpret_cast<const uint4*>(rows + in_block * row_pitch(args) + unit * UNIT_PITCH);
#pragma unroll
            for (int i = 0; i < int(UNIT_IN) / 8; ++i) unpack(reinterpret_cast<float(&)[8]>(v[8 * i]), raw[i], args.x_type);
        } else {
#pragma unroll
            for (int i = 0; i < int(UNIT_IN); ++i) {
                const u32 column = unit * UNIT_IN + i;
                v[i] = column < args.in_width ? load_element(args.x, row * args.x_stride + column, args.x_type) : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < int(UNIT_IN) / 8; ++i) {
            float factors[8];
            unpack(factors, scales[i], F16);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[8 * i + j] *= factors[j];
        }
    }
    // Rotates, rounds and stores it.
    __device__ __forceinline__ void store(float (&v)[UNIT_IN], const PrefillArgs& args, u32 shard, float factor) const {
#pragma unroll
        for (int step = 1; step < int(UNIT_IN); step *= 2)
#pragma unroll
            for (int i = 0; i < int(UNIT_IN); ++i)
                if (!(i & step)) {
                    const float a = v[i], b = v[i + step];
                    v[i] = a + b, v[i + step] = a - b;
                }
        const float sign = unit & 1 ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < int(UNIT_IN); ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xffffffffu, v[i], 1)) * factor;
        if (!exists) return;
        const u32 units = args.in_features / UNIT_IN, row_tile = row / args.tile_rows, token = row % args.tile_rows;
        uint4* to = reinterpret_cast<uint4*>(args.activations) +
            (static_cast<u64>(shard * args.row_tiles + row_tile) * units + unit) * (args.tile_rows * 8) + token;
#pragma unroll
        for (int matrix = 0; matrix < 8; ++matrix) {
            u32 words[4];  // of k-tile 0..3: matrix m has its pair m/2 + 4·(m % 2)
#pragma unroll
            for (int tile = 0; tile < 4; ++tile) {
                const float* pair = v + 16 * tile + 2 * (matrix / 2) + 8 * (matrix % 2);
                asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[tile]) : "f"(pair[1]), "f"(pair[0]));
            }
            to[matrix * args.tile_rows] = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
};

// Starts to bring the block's rows to shared memory.
__device__ __forceinline__ void hold_rows(const PrefillArgs& args, u8* rows) {
    const u32 width = args.in_features / 8, pitch = row_pitch(args);
    for (u32 in_block = 0; in_block < args.block_rows; ++in_block) {
        const u32 row = blockIdx.x * args.block_rows + in_block;
        if (row >= args.rows) return;
        const u16* x = static_cast<const u16*>(args.x) + row * args.x_stride;
        for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
            u8* to = rows + in_block * pitch + i / 8 * UNIT_PITCH + i % 8 * 16;
            if (8 * i < args.in_width) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(x + 8 * i) : "memory");
            else *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
        }
    }
}

// Grid (groups of args.block_rows rows).
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1) exl3_prefill_transform(const __grid_constant__ PrefillArgs args) {
    extern __shared__ __align__(16) u8 rows[];  // with args.holds, the block's rows
    __shared__ u32 largest[MAX_SHARDS][MOST_ROWS];
    const bool held = args.holds && loads_vectors(args);
    const u32 items = 2 * args.block_rows * (args.in_features / STRIP), in_block = threadIdx.x / 2 % args.block_rows;
    let_next_start();
    for (u32 i = threadIdx.x; i < MAX_SHARDS * MOST_ROWS; i += blockDim.x) largest[i / MOST_ROWS][i % MOST_ROWS] = 0;
    wait_for_previous();
    if (held) hold_rows(args, rows);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    // All items of a thread are of one row; a warp goes through its items together.
#pragma unroll 1
    for (u32 s = 0; s < args.shard_count; ++s) {
        float most = 0.0f;
#pragma unroll 1
        for (u32 i = threadIdx.x; i - threadIdx.x % 32 < items; i += blockDim.x) {
            float v[UNIT_IN];
            Item(args, i).load(v, args, rows, args.shards[s].suh, held);
#pragma unroll
            for (int j = 0; j < int(UNIT_IN); ++j) most = larger(most, v[j]);
        }
        u32 bits = __float_as_uint(most);
        bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 1));
        for (u32 lanes = 2 * args.block_rows; lanes < 32; lanes *= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, lanes));
        if ((threadIdx.x & 31) < 2 * args.block_rows && (threadIdx.x & 1) == 0) atomicMax(&largest[s][in_block], bits);
    }
    __syncthreads();
#pragma unroll 1
    for (u32 s = 0; s < args.shard_count; ++s) {
        const RowScale scale = row_scale(HALF, largest[s][in_block]);
        const u32 row = blockIdx.x * args.block_rows + in_block;
        if (threadIdx.x < 2 * args.block_rows && (threadIdx.x & 1) == 0 && row < args.rows) args.scales[s * args.rows + row] = scale.undo;
#pragma unroll 1
        for (u32 i = threadIdx.x; i - threadIdx.x % 32 < items; i += blockDim.x) {
            const Item item(args, i);
            float v[UNIT_IN];
            item.load(v, args, rows, args.shards[s].suh, held);
            item.store(v, args, s, scale.factor);
        }
    }
}

// The input side of prefill: A = H(x·suh)/sqrt(128) of every row and shard in fp16, scaled by a power of two a row, in the
// order in which wgmma reads it as its B operand.
//
// A block has a few whole rows, since what a row is scaled by depends on all of it. They come to shared memory once and are
// read twice, for the scale and to be rotated.
#include "prefill_item.cuh"
#include "rotation.cuh"

constexpr int MOST_THREADS = 512, MOST_ROWS = 16;

// Rounds a rotated item and stores it.
__device__ __forceinline__ void store_halves(const Item& item, float (&v)[UNIT_IN], const PrefillArgs& args, u32 shard, float factor) {
#pragma unroll
    for (int i = 0; i < int(UNIT_IN); ++i) v[i] *= factor;
    if (!item.exists) return;
    const u32 units = args.in_features / UNIT_IN, row_tile = item.row / args.tile_rows, token = item.row % args.tile_rows;
    uint4* to = reinterpret_cast<uint4*>(args.activations) +
        (static_cast<u64>(shard * args.row_tiles + row_tile) * units + item.unit) * (args.tile_rows * 8) + token;
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

// Grid (groups of args.block_rows rows).
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1) exl3_prefill_transform(const __grid_constant__ PrefillArgs args) {
    extern __shared__ __align__(16) u8 rows[];  // with args.holds, the block's rows, and behind them the shard's suh
    __shared__ u32 largest[MAX_SHARDS][MOST_ROWS];
    const bool held = args.holds && loads_vectors(args);
    const u32 items = 2 * args.block_rows * (args.in_features / STRIP), in_block = threadIdx.x / 2 % args.block_rows;
    const u32 row = blockIdx.x * args.block_rows + in_block;
    u8* suh = rows + args.block_rows * row_pitch(args);
    const auto load = [&](float(&v)[UNIT_IN], const Item& item, u32 s) {
        if (held) item.load_held(v, args, rows, suh);
        else item.load(v, args, rows, args.shards[s].suh, false);
    };
    let_next_start();
    for (u32 i = threadIdx.x; i < MAX_SHARDS * MOST_ROWS; i += blockDim.x) largest[i / MOST_ROWS][i % MOST_ROWS] = 0;
    if (held) hold_suh(args, 0, suh);  // weights never change; x is written by the kernel ahead
    wait_for_previous();
    if (held) hold_rows(args, rows);
#pragma unroll 1
    for (u32 s = 0; s < args.shard_count; ++s) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        // All items of a thread are of one row; a warp goes through its items together.
        float most[4] = {};  // chains that do not wait for each other
#pragma unroll 1
        for (u32 i = threadIdx.x; i - threadIdx.x % 32 < items; i += blockDim.x) {
            float v[UNIT_IN];
            load(v, Item(args, i), s);
#pragma unroll
            for (int j = 0; j < int(UNIT_IN); ++j) most[j % 4] = larger(most[j % 4], v[j]);
        }
        u32 bits = __float_as_uint(larger(larger(most[0], most[1]), larger(most[2], most[3])));
        bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 1));
        for (u32 lanes = 2 * args.block_rows; lanes < 32; lanes *= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, lanes));
        if ((threadIdx.x & 31) < 2 * args.block_rows && (threadIdx.x & 1) == 0) atomicMax(&largest[s][in_block], bits);
        __syncthreads();
        const RowScale scale = row_scale(HALF, largest[s][in_block]);
        if (threadIdx.x < 2 * args.block_rows && (threadIdx.x & 1) == 0 && row < args.rows) args.scales[s * args.rows + row] = scale.undo;
#pragma unroll 1
        for (u32 i = threadIdx.x; i - threadIdx.x % 32 < items; i += blockDim.x) {
            const Item item(args, i);
            float v[UNIT_IN];
            load(v, item, s);
            item.rotate(v);
            store_halves(item, v, args, s, scale.factor);
        }
        if (!held || s + 1 == args.shard_count) continue;
        __syncthreads();
        hold_suh(args, s + 1, suh);
    }
}

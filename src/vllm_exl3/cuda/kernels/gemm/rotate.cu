// The input side of the GEMM for few tokens: A = H(x·suh)/sqrt(128) of every row and shard in fp16, scaled by a power of two a row, in the
// order in which wgmma reads it as its B operand.
//
// It lies between two kernels that fill every multiprocessor, so all that counts is latency: a warp transforms a few 128-blocks of one row
// and keeps them in registers until the blocks of the row's cluster have agreed on its largest magnitude. A thread block is so small that
// it starts beside a block of the GEMM before it, and one of the GEMM behind it beside it (up to 80 tokens and with one kind of shards).
//
// What comes before a linear in a model may be computed here as well, which saves a kernel: an RMS norm, whose division by the root mean
// square is a factor of the row and goes into its scale, or the product of an activation.
//
// The compiler's caller defines INSTANCE_TRANSFORMS, the 128-blocks of a warp; INSTANCE_BYTES, 1 where A is rounded to int8 instead; and
// INSTANCE_INPUT, an `Input`.
#include "base/barrier.cuh"
#include "prefill/arguments.cuh"
#include "base/row_scale.cuh"

constexpr int WARPS = 8, TRANSFORMS = INSTANCE_TRANSFORMS;
constexpr u32 MOST_RANKS = 8;  // blocks of a cluster

// The rotated values: x; (x + residual)·norm_weight, which the root mean square of x + residual divides; or silu(x)·u, where u lies behind
// the in_width columns of x. All but x alone are of 16 bits, in whole vectors of four.
enum Input { PLAIN, RMS_NORM, SILU_AND_MUL };
constexpr Input INPUT = Input(INSTANCE_INPUT);

__device__ __forceinline__ void unpack4(float (&v)[4], uint2 raw, u32 type) {
    const u16 bits[4] = {u16(raw.x), u16(raw.x >> 16), u16(raw.y), u16(raw.y >> 16)};
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = type == F16 ? half_to_float(bits[j]) : __uint_as_float(u32(bits[j]) << 16);
}
__device__ __forceinline__ u32 pack2(float low, float high, u32 type) {
    u32 word;
    if (type == F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}
template <class Array>
__device__ __forceinline__ float block_sum(Array& warps) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sum += warps[i];
    return sum;
}

// The part of a row that a warp transforms for one shard: some of its 128-blocks.
struct Row {
    const PrefillArgs& args;
    u32 shard, row, first, step;  // the warp's first 128-block, and from one to the next
    int lane;

    __device__ __forceinline__ u32 block(int i) const { return first + i * step; }
    __device__ __forceinline__ bool exists(int i) const { return block(i) < args.in_features / HADAMARD_SIZE; }
    __device__ __forceinline__ u32 column(int i) const { return block(i) * HADAMARD_SIZE + 4 * lane; }
    __device__ __forceinline__ uint2 scales(int i) const {
        return exists(i) ? *reinterpret_cast<const uint2*>(args.shards[shard].suh + column(i)) : make_uint2(0, 0);
    }
    // Weights never change; x is written by the kernel ahead.
    __device__ __forceinline__ void prefetch_weights() const {
#pragma unroll
        for (int i = 0; i < TRANSFORMS; ++i) {
            if (!exists(i)) continue;
            asm volatile("prefetch.global.L1 [%0];" ::"l"(args.shards[shard].suh + column(i)));
            if (INPUT == RMS_NORM && column(i) < args.in_width) asm volatile("prefetch.global.L1 [%0];" ::"l"(element(args.norm_weight, column(i))));
        }
    }
    __device__ __forceinline__ const u16* element(const void* of, u64 index) const { return static_cast<const u16*>(of) + index; }
    __device__ __forceinline__ void load4(float (&v)[4], const void* of, u64 index) const {
        unpack4(v, *reinterpret_cast<const uint2*>(element(of, index)), args.x_type);
    }
    // Columns of x of any type.
    __device__ __forceinline__ void load_plain(float (&v)[4], int i) const {
        const bool vectors = args.x_type != F32 && (args.in_width | args.x_stride) % 4 == 0 && reinterpret_cast<u64>(args.x) % 8 == 0;
        if (vectors) {
            const bool inside = exists(i) && column(i) < args.in_width;
            unpack4(v, inside ? *reinterpret_cast<const uint2*>(element(args.x, row * args.x_stride + column(i))) : make_uint2(0, 0), args.x_type);
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                v[j] = exists(i) && column(i) + j < args.in_width ? load_element(args.x, row * args.x_stride + column(i) + j, args.x_type) : 0.0f;
        }
    }
    // (x + residual)·norm_weight; adds to the sum of squares. `total`: x + residual as it is stored.
    __device__ __forceinline__ void load_norm(float (&v)[4], int i, float& squares, uint2& total) const {
        float residual[4] = {0.0f, 0.0f, 0.0f, 0.0f}, weight[4];
        load4(v, args.x, row * args.x_stride + column(i));
        if (args.residual != nullptr) load4(residual, args.residual, static_cast<u64>(row) * args.in_width + column(i));
        load4(weight, args.norm_weight, column(i));
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] += residual[j];
        total = make_uint2(pack2(v[0], v[1], args.x_type), pack2(v[2], v[3], args.x_type));
#pragma unroll
        for (int j = 0; j < 4; ++j) squares += v[j] * v[j], v[j] *= weight[j];
    }
    // A store that came before the loads of the next 128-block would hold them up.
    __device__ __forceinline__ void store_total(int i, uint2 total) const {
        if (shard > 0 || args.residual_out == nullptr || !exists(i) || column(i) >= args.in_width) return;
        *reinterpret_cast<uint2*>(static_cast<u16*>(args.residual_out) + static_cast<u64>(row) * args.in_width + column(i)) = total;
    }
    __device__ __forceinline__ void load_product(float (&v)[4], int i) const {
        const u64 at = row * args.x_stride + column(i);
        float up[4];
        load4(v, args.x, at);
        load4(up, args.x, at + args.in_width);
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = __fdividef(v[j], 1.0f + __expf(-v[j])) * up[j];
    }
    // Unscaled H(x·suh).
    __device__ __forceinline__ void load(float (&v)[4], int i, float& squares, uint2& total) const {
        const uint2 scale = scales(i);
        if (INPUT == PLAIN) load_plain(v, i);
        else if (!exists(i) || column(i) >= args.in_width) v[0] = v[1] = v[2] = v[3] = 0.0f;
        else if (INPUT == RMS_NORM) load_norm(v, i, squares, total);
        else load_product(v, i);
        const u16 factors[4] = {u16(scale.x), u16(scale.x >> 16), u16(scale.y), u16(scale.y >> 16)};
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] *= half_to_float(factors[j]);
        hadamard128(v, lane);
    }
    // Rounds a 128-block to int8 and stores it: four channels a lane, of k-tile lane / 4.
    __device__ __forceinline__ void store_bytes(const float (&v)[4], int i, float factor) const {
        if (!exists(i)) return;
        const u32 k_block = 2 * block(i) + lane / 16, q = lane / 4 & 3;
        u8* to = args.activations + (shard * (args.in_features / BLOCK_K) + k_block) * static_cast<u64>(64 * args.tile_rows) + 16 * row + 4 * q;
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            int values[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(values[e]) : "f"(v[2 * j + e] * factor));
            const u32 pair = 2 * (lane & 3) + j;  // matrix m has pairs m and m + 4 of a k-tile
            *reinterpret_cast<u16*>(to + pair % 4 * 16 * args.tile_rows + pair / 4 * 2) = u16(values[0] & 0xff | values[1] << 8);
        }
    }
    // The same to fp16; gives what byte sums of these channels leave out.
    __device__ __forceinline__ float store(const float (&v)[4], int i, float factor) const {
        if (!exists(i)) return 0.0f;
        const u32 channel = 4 * (lane & 3), k_block = 2 * block(i) + lane / 16, q = lane / 4 & 3;
        u32 words[2];
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[0]) : "f"(v[1] * factor), "f"(v[0] * factor));
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[1]) : "f"(v[3] * factor), "f"(v[2] * factor));
        ComplementSum sum;
        if (args.shards[shard].complements) {
#pragma unroll
            for (u32 j = 0; j < 2; ++j) {
                const u32 k = channel + 2 * j, flips = u32(complemented(k)) << 15 | u32(complemented(k + 1)) << 31;
                sum.add(words[j], flips);
                words[j] ^= flips;
            }
        }
        const u64 k_block_bytes = 128 * args.tile_rows;
        u8* to = args.activations + (shard * (args.in_features / BLOCK_K) + k_block) * k_block_bytes + 16 * row + 4 * q;
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            const u32 pair = (channel + 2 * j) / 2, matrix = 2 * (pair % 4) + pair / 4;
            *reinterpret_cast<u32*>(to + matrix * 16 * args.tile_rows) = words[j];
        }
        return sum.offset();
    }
};

// Grid (blocks of a cluster × rows, shards): a cluster has a row of one shard. A cluster for all shards of a row takes twice as long for three of
// them, although it leaves multiprocessors room for the GEMM's blocks to start early.
extern "C" __global__ void __launch_bounds__(32 * WARPS, TRANSFORMS < 4 ? 8 : 6) exl3_gemm_rotate(const __grid_constant__ PrefillArgs args) {
    __shared__ u32 largest;
    __shared__ float offsets[WARPS], squares[WARPS], squares_of_rank[MOST_RANKS];
    __shared__ __align__(8) u64 arrived;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const u32 ranks = args.cluster_size, rank = blockIdx.x % ranks;
    const Row row{args, blockIdx.y, blockIdx.x / ranks, rank * WARPS + warp, ranks * WARPS, lane};
    launch_dependent_grids();
    if (threadIdx.x == 0) {
        largest = 0;
        mbarrier_init(shared_address(&arrived), 1);
        fence_barrier_init();
    }
    if (ranks > 1) cluster_arrive();
    row.prefetch_weights();
    __syncthreads();
    wait_on_dependent_grids();
    if (blockIdx.x == 0 && blockIdx.y == 0)
        for (u32 i = threadIdx.x; i < args.n_tiles; i += blockDim.x) args.arrivals[i] = 0;
    float v[TRANSFORMS][4], square = 0.0f;
    uint2 totals[TRANSFORMS];
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < TRANSFORMS; ++i) {
        row.load(v[i], i, square, totals[i]);
        most = max(most, magnitude_bits(v[i]));
    }
    most = __reduce_max_sync(0xffffffffu, most);
    if (INPUT == RMS_NORM) {
        square = warp_sum(square);
#pragma unroll
        for (int i = 0; i < TRANSFORMS; ++i) row.store_total(i, totals[i]);
    }
    if (lane == 0) {
        atomicMax(&largest, most);
        squares[warp] = square;
    }
    __syncthreads();
    const u32 from_each = INPUT == RMS_NORM && rank == 0 ? 8 : 4;  // bytes that come from each other block
    if (ranks > 1) {
        if (threadIdx.x == 0) mbarrier_arrive_expect_tx(shared_address(&arrived), from_each * (ranks - 1));
        cluster_wait();  // the others' shared memory is ready
        const u32 other = threadIdx.x;
        if (other < ranks && other != rank) {
            const u32 barrier = map_to_rank(shared_address(&arrived), other);
            max_remote(map_to_rank(shared_address(&largest), other), largest, barrier);
            if (INPUT == RMS_NORM && other == 0) store_remote_async(map_to_rank(shared_address(&squares_of_rank[rank]), 0), block_sum(squares), barrier);
        }
        mbarrier_wait_cluster(shared_address(&arrived), 0);
    }
    const float bound = __uint_as_float(*static_cast<volatile u32*>(&largest));  // of unscaled values
    const RowScale scale = INSTANCE_BYTES ? byte_scale(bound) : half_scale(bound * HADAMARD_SCALE);
    float offset = 0.0f;
#pragma unroll
    for (int i = 0; i < TRANSFORMS; ++i) {
        if (INSTANCE_BYTES) row.store_bytes(v[i], i, scale.factor);
        else offset += row.store(v[i], i, scale.factor);
    }
    if (threadIdx.x == 0 && rank == 0) {
        float descale = scale.descale;
        if (INPUT == RMS_NORM) {
            float sum = block_sum(squares);
            for (u32 other = 1; other < ranks; ++other) sum += *static_cast<volatile float*>(&squares_of_rank[other]);
            descale *= rsqrtf(sum / args.in_width + args.epsilon);
        }
        args.scales[row.shard * args.rows + row.row] = descale;
    }
    if (INSTANCE_BYTES) return;
    offset = warp_sum(offset);
    if (lane == 0) offsets[warp] = offset;
    __syncthreads();
    if (threadIdx.x == 0) args.offsets[(row.shard * args.rows + row.row) * ranks + rank] = block_sum(offsets);
}

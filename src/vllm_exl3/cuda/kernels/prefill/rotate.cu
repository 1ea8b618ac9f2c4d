// The input side of prefill on the tensor cores: A = H(x·suh) of every row and shard in fp16, scaled by a power of two a row, in
// the order in which wgmma reads it as its B operand. For 16-bit inputs in aligned vectors; prefill/transform.cu serves others.
//
// A warp rotates 8 rows × one 128-block at once. H128 is H16 ⊗ H8: H16 by mma.m16n8k16, H8 by additions in registers. The A
// operand is H16·diag(suh), so that products are exact in fp32 and x·suh is never rounded; the B operand is x as it lies in
// memory (bfloat16 is converted to fp16 after scaling, which is exact but for what is 2^-25 of the row's largest and less). With
//
//   k bit     0         1         3      6      2      4      5
//   input     half      register  lane   lane   product (H8 over these eight)
//   output    register  lane      lane   lane   product
//
// a lane takes 16 bytes of x at a time and has whole 16-byte chunks of the result, and a warp's stores are runs of 64 bytes.
//
// What a row is scaled by depends on all of it, but is guessed from its first 128-block, with room for outliers 128 times as
// large. The block (or cluster) learns the row's largest magnitude on the way; where the guess was no good it does its rows again.
#include "base/cp_async.cuh"
#include "base/barrier.cuh"
#include "base/mma.cuh"
#include "prefill/arguments.cuh"
#include "base/row_scale.cuh"

// The compiler's caller defines ROTATE_WARPS, of a block, and ROTATE_BLOCKS, of a multiprocessor.
constexpr int ROWS = 8;  // of a warp, and of the blocks of a cluster, which share these rows' 128-blocks

// A warp has a queue of places in shared memory, one for x of each of its next 128-blocks: loads by whole lines, where lanes would
// each fetch 16 bytes of their own rows. Another place has the rows' first 128-block for all warps.
constexpr u32 QUEUED = 2, PLACE_BYTES = 2 * HADAMARD_SIZE * ROWS, QUEUE_BYTES = QUEUED * PLACE_BYTES;
// Of rows' bounds; of barriers behind them, one a shard. Places lie behind both, at multiples of 128: `take` flips bits of addresses.
constexpr u32 LARGEST_BYTES = 4 * ROWS, ARRIVED_BYTES = 128 - LARGEST_BYTES;  // together 128, so that what follows is aligned

constexpr u32 OUTLIERS = 7;  // powers of two between the guess and the largest scale
constexpr u32 SHIFT = 4;     // 2^SHIFT > sqrt(128): what the transform is not divided by, the scale is

// fp16 2^-12: the smallest suh that a bound of |x·suh| reckons with. A row is scaled to bounds below 2^7/sqrt(128), so that its x,
// which may lie beside no larger suh, stays below 46341 and converts to fp16; an infinity would be NaN beside zeros.
constexpr u32 LEAST_SUH = 0x0c00;

// The larger magnitude of each half, its sign anything; a NaN is above all.
__device__ __forceinline__ u32 larger_pair(u32 a, u32 b, u32 type) {
    u32 result;
    if (type == F16) asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    else asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
__device__ __forceinline__ float largest_of(u32 pair, u32 type, u32 least = 0) {
    const u32 bits = max(max(pair & 0x7fffu, pair >> 16 & 0x7fffu), least);
    return type == F16 ? half_to_float(u16(bits)) : __uint_as_float(bits << 16);
}
__device__ __forceinline__ u32 largest_of_words(const u32 (&words)[4][4], u32 type) {
    u32 most[4];  // chains that do not wait for each other
#pragma unroll
    for (int i = 0; i < 4; ++i) most[i] = larger_pair(larger_pair(words[0][i], words[1][i], type), larger_pair(words[2][i], words[3][i], type), type);
    return larger_pair(larger_pair(most[0], most[1], type), larger_pair(most[2], most[3], type), type);
}

// Exponents of scales, biased as in floats: the largest one that is safe, and what is tried at first.
__device__ __forceinline__ u32 exact_exponent(u32 bits) {
    const u32 bound = __float_as_uint(__uint_as_float(bits) * HADAMARD_GROWTH) >> 23 & 0xffu;
    return min(264u - max(1u, bound), 253u);
}
__device__ __forceinline__ u32 guessed_exponent(u32 bits) { return bits == 0 ? 127u : max(exact_exponent(bits) - OUTLIERS, SHIFT + 1); }
__device__ __forceinline__ bool suits(u32 guess, u32 bits) {
    const u32 exact = exact_exponent(bits);
    return bits == 0 || (guess <= exact && guess + OUTLIERS + 2 >= exact);
}

// 2^(exponent - 127 - SHIFT).
__device__ __forceinline__ float scale_of(u32 exponent) { return __uint_as_float((exponent - SHIFT) << 23); }

template <u32 TYPE>
struct Rotation {
    const PrefillArgs& args;
    u32 lane, g, q;
    u32 signs[4];     // of the lane's A operand
    const u8* x;      // of the row and channels that the lane fetches
    u32 row, column;  // which these are
    u32 put, get;     // where in a place it writes what it fetches, and reads what it multiplies, free of bank conflicts
    const u8* suh;    // at the lane's first channel
    u8* to[2];        // where the lane's results of two rows go
    bool exists[2];     // whether these rows exist
    u32 block_bytes, place_bytes;  // from one 128-block's results to the next; from matrix m to m + 4

    __device__ __forceinline__ Rotation(const PrefillArgs& args, u32 shard, u32 first_row, u32 lane) : args(args), lane(lane), g(lane >> 2), q(lane & 3) {
        const u32 piece = lane % 16;
        row = first_row + lane / 16, column = 8 * piece;
        x = reinterpret_cast<const u8*>(static_cast<const u16*>(args.x) + static_cast<i64>(row) * args.x_stride + column);
        put = 256 * (lane / 16) + 16 * ((piece & 8) + (piece & 7 ^ piece >> 3 << 1));
        get = 256 * token() + 16 * (8 * (q >> 1) + ((q & 1) | 2 * (q >> 1) ^ 4 * (g & 1)));
        suh = reinterpret_cast<const u8*>(args.shards[shard].suh + 8 * (q & 1) + 64 * (q >> 1));
        const u32 base = ((g & q) ^ (g >> 2 & q >> 1)) & 1 ? 0x80008000u : 0, other = g & 2 ? 0x80008000u : 0;
        signs[0] = base, signs[1] = base ^ 0x80000000u, signs[2] = base ^ other, signs[3] = base ^ other ^ 0x80000000u;
        block_bytes = 2 * 128 * args.tile_rows, place_bytes = 4 * 16 * args.tile_rows;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 mine = first_row + q + 4 * half, tile = mine / args.tile_rows, place = mine % args.tile_rows;
            exists[half] = mine < args.rows;
            to[half] = args.activations + static_cast<u64>(shard * args.row_tiles + tile) * (args.in_features / BLOCK_K) * (args.tile_rows * 128) +
                (g >> 2) * (128 * args.tile_rows) + (g & 3) * (16 * args.tile_rows) + 16 * place;
        }
    }
    __device__ __forceinline__ u32 token() const { return (g >> 1) + 4 * (g & 1); }

    // Starts to copy two of the eight rows of a 128-block of x to a place; zeros where there is none.
    __device__ __forceinline__ void fetch_pair(u32 place, u32 block, u32 pair) const {
        const bool exists = row + 2 * pair < args.rows && HADAMARD_SIZE * block + column < args.in_width;
        const u32 target = place + 512 * pair + (put ^ (pair < 2 ? 0 : 64)), bytes = exists ? 16 : 0;
        cp_async_16(target, x + 2 * HADAMARD_SIZE * block + 4 * pair * args.x_stride, bytes);
    }
    __device__ __forceinline__ void fetch(u32 place, u32 block) const {
#pragma unroll
        for (u32 pair = 0; pair < 4; ++pair) fetch_pair(place, block, pair);
    }
    // The lane's operands of a place.
    __device__ __forceinline__ void take(u32 (&words)[4][4], u32 place) const {
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(words[i][0]), "=r"(words[i][1]), "=r"(words[i][2]), "=r"(words[i][3])
                         : "r"((place + get) ^ 32 * i) : "memory");
    }
    __device__ __forceinline__ void load_scales(u32 (&words)[4][4], u32 block) const {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const uint4 raw = *reinterpret_cast<const uint4*>(suh + 2 * HADAMARD_SIZE * block + 32 * i);
            words[i][0] = raw.x, words[i][1] = raw.y, words[i][2] = raw.z, words[i][3] = raw.w;
        }
    }
    // Bits of a bound of |x·suh| of the lane's channels.
    __device__ __forceinline__ u32 bound(const u32 (&words)[4][4], const u32 (&scales)[4][4]) const {
        const u32 least = TYPE == F16 ? 0 : LEAST_SUH;
        return __float_as_uint(largest_of(largest_of_words(words, TYPE), TYPE) * largest_of(largest_of_words(scales, F16), F16, least));
    }
    __device__ __forceinline__ u32 row_bound(u32 bits) const {
        bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 1));
        return max(bits, __shfl_xor_sync(0xffffffffu, bits, 2));
    }
    // The scales of the rows of a lane's results, from those of the rows that lanes load.
    __device__ __forceinline__ void exchange(float (&scales)[2], float mine) const {
        scales[0] = __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(mine), 8 * q));
        scales[1] = __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(mine), 8 * q + 4));
    }
    // H16 of a 128-block. `mine`: scale of the row that the lane loads.
    __device__ __forceinline__ void multiply(float (&sums)[8][4], const u32 (&words)[4][4], const u32 (&scales)[4][4], float mine) const {
        const float none[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                u32 b[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const u32 word = words[i][2 * j + r];
                    if (TYPE == F16) b[r] = word;
                    else
                        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(b[r]) : "f"(__uint_as_float(word & 0xffff0000u) * mine),
                            "f"(__uint_as_float(word << 16) * mine));
                }
                const u32 low = scales[i][2 * j], high = scales[i][2 * j + 1];
                const u32 a[4] = {low ^ signs[0], low ^ signs[1], high ^ signs[2], high ^ signs[3]};
                mma_half(sums[2 * i + j], a, b[0], b[1], none);
            }
    }
    // H8 and all that follows. `results`: scales of the rows of the lane's results.
    __device__ __forceinline__ void finish(float (&sums)[8][4], u32 block, const float (&results)[2]) const {
        hadamard8(sums);
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            uint4 chunks[2];
#pragma unroll
            for (u32 bit = 0; bit < 2; ++bit) {
                u32 words[4];
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const float(&d)[4] = sums[2 * i + bit];
                    const float low = TYPE == F16 ? d[half] * results[half] : d[half], high = TYPE == F16 ? d[2 + half] * results[half] : d[2 + half];
                    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(high), "f"(low));
                }
                chunks[bit] = make_uint4(words[0], words[1], words[2], words[3]);
            }
            if (!exists[half]) continue;
            u8* at = to[half] + static_cast<u64>(block) * block_bytes;
            *reinterpret_cast<uint4*>(at) = chunks[0], *reinterpret_cast<uint4*>(at + place_bytes) = chunks[1];
        }
    }
};

// Every `step`th 128-block from `first` on, through the warp's queue, which fills while `scale` finds the scale of the row that the
// lane multiplies. Gives bits of a bound of |x·suh|.
template <u32 TYPE, class Scale>
__device__ __forceinline__ u32 rotate_blocks(const Rotation<TYPE>& rotation, u32 queue, u32 first, u32 step, u32 blocks, const Scale& scale) {
    u32 words[4][4], scales[4][4], most = 0, place = queue;
    float sums[8][4], results[2];
#pragma unroll
    for (u32 i = 0; i < QUEUED; ++i) {
        if (first + i * step < blocks) rotation.fetch(queue + PLACE_BYTES * i, first + i * step);
        cp_async_commit();
    }
    if (first < blocks) rotation.load_scales(scales, first);
    const float mine = scale();
    rotation.exchange(results, mine);
#pragma unroll 1
    for (u32 block = first; block < blocks; block += step) {
        cp_async_wait<QUEUED - 1>();
        __syncwarp();  // other lanes' copies are there, too
        rotation.take(words, place);
        most = max(most, rotation.bound(words, scales));
        rotation.multiply(sums, words, scales, mine);
        __syncwarp();  // and nobody reads the place any more
        if (block + QUEUED * step < blocks) rotation.fetch(place, block + QUEUED * step);
        cp_async_commit();
        place = place + PLACE_BYTES == queue + QUEUE_BYTES ? queue : place + PLACE_BYTES;
        if (block + step < blocks) rotation.load_scales(scales, block + step);
        rotation.finish(sums, block, results);
    }
    return rotation.row_bound(most);
}

// Bits of the largest bounds of the block's rows become those of the cluster's `ranks` blocks. A barrier counts what comes from the
// others: the cluster's barrier would wait until all that the block has stored is in memory.
__device__ __forceinline__ void exchange_largest(u32 (&largest)[ROWS], u32 arrived, u32 ranks) {
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(arrived, 4 * ROWS * (ranks - 1));
    if (threadIdx.x < ROWS)
#pragma unroll 1
        for (u32 other = 0; other < ranks; ++other)
            if (other != blockIdx.x % ranks)
                max_remote(map_to_rank(shared_address(&largest[threadIdx.x]), other), largest[threadIdx.x], map_to_rank(arrived, other));
    mbarrier_wait(arrived, 0);
}

// The block's part of a group of rows, for one shard.
template <u32 TYPE>
__device__ __forceinline__ void rotate_rows(const PrefillArgs& args, u32 (&largest)[ROWS]) {
    const u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), ranks = args.cluster_size, first = blockIdx.x % ranks * ROTATE_WARPS + warp;
    const u32 blocks = args.in_features / HADAMARD_SIZE, first_row = blockIdx.x / ranks * ROWS, lane = threadIdx.x & 31;
    const u32 arrived = shared_address(largest) + LARGEST_BYTES;
    const u32 first_block = arrived + ARRIVED_BYTES, queue = first_block + PLACE_BYTES + warp * QUEUE_BYTES;
    const Rotation<TYPE> rotation(args, blockIdx.y, first_row, lane);
    for (u32 pair = warp; pair < ROWS / 2; pair += ROTATE_WARPS) rotation.fetch_pair(first_block, 0, pair);
    cp_async_commit();
    u32 guess;
    const u32 most = rotate_blocks(rotation, queue, first, ranks * ROTATE_WARPS, blocks, [&] {
        u32 words[4][4], scales[4][4];
        rotation.load_scales(scales, 0);
        cp_async_wait<QUEUED>();
        __syncthreads();  // all four pairs of rows are there
        rotation.take(words, first_block);
        guess = guessed_exponent(rotation.row_bound(rotation.bound(words, scales)));
        return scale_of(guess);
    });
    if (rotation.q == 0) atomicMax(&largest[rotation.token()], most);
    __syncthreads();
    if (ranks > 1) {
        cluster_wait();  // others' shared memory is cleared
        exchange_largest(largest, arrived, ranks);
    }
    const u32 bits = largest[rotation.token()];
    const bool good = suits(guess, bits);
    const u32 exponent = good ? guess : exact_exponent(bits);
    if (first == 0 && rotation.q == 0 && first_row + rotation.token() < args.rows) {
        const float descale = __uint_as_float((254u - exponent) << 23) * (HADAMARD_SCALE * (1 << SHIFT)), value = __uint_as_float(bits);
        args.scales[blockIdx.y * args.rows + first_row + rotation.token()] = value <= 2.9e37f ? descale : value * 1.0e30f;
    }
    if (__any_sync(0xffffffffu, !good)) rotate_blocks(rotation, queue, first, ranks * ROTATE_WARPS, blocks, [&] { return scale_of(exponent); });
}

// Grid (groups of 8 rows × blocks of a cluster, shards): a block has one shard, since a fused layer of few rows leaves room for blocks of all.
extern "C" __global__ void __launch_bounds__(32 * ROTATE_WARPS, ROTATE_BLOCKS) exl3_prefill_rotate(const __grid_constant__ PrefillArgs args) {
    extern __shared__ __align__(128) u32 shared[];
    auto& largest = *reinterpret_cast<u32(*)[ROWS]>(shared);  // bits of rows' bounds; queues lie behind
    launch_dependent_grids();
    if (threadIdx.x < ROWS) largest[threadIdx.x] = 0;
    if (args.cluster_size > 1) {
        if (threadIdx.x == 0) mbarrier_init(shared_address(shared) + LARGEST_BYTES, 1);
        fence_barrier_init();
        cluster_arrive();
    }
    __syncthreads();
    wait_on_dependent_grids();
    if (blockIdx.x == 0 && blockIdx.y == 0) clear_arrivals(args);
    if (args.x_type == F16) rotate_rows<F16>(args, largest);
    else rotate_rows<BF16>(args, largest);
}

// From the warps' partial sums of one strip to finished outputs.
//
// 1. The warps (k slices) are added in shared memory in a fixed order.
// 2. A strip that several blocks share: every block stores its sums, the block that arrives last adds them in k order.
//    Which blocks share it depends on (N, K, blocks) alone, so fp32 sums come out the same every time.
// 3. Output Hadamard, svh, bias, crop and cast, one warp a token.
#pragma once
#include "fragments.cuh"
#include "hadamard.cuh"

constexpr int WARPS = INSTANCE_WARPS;  // 16, or fewer where shared memory is small
constexpr int THREADS = 32 * WARPS;
constexpr int REDUCTION_SLOTS = WARPS < 8 ? WARPS / 2 : 4;
constexpr int STRIP_TILES = STRIP / 16;

// Shared memory of the epilogue; `columns` is the widest kind's.
template <int TILE_ROWS, int COLUMNS>
struct Epilogue {
    uint4 slots[REDUCTION_SLOTS][STRIP_TILES * COLUMNS * 32];
    float outputs[TILE_ROWS][STRIP + 4];
    int token_sums[TILE_ROWS];
    u32 last;
};

// The part of a strip that one block computed.
struct Segment {
    u32 shard, strip;        // strip counts (strip, row tile) inside the shard
    u32 strip_begin, strip_end;
    bool complete;           // the block computed all of the strip
};

template <class T> struct Vector4 { T x, y, z, w; };

template <class T>
__device__ __forceinline__ Vector4<T> as_vector(const uint4& v) {
    if constexpr (sizeof(T(0)) == 4 && T(0.5f) != T(0))
        return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
    else return {T(v.x), T(v.y), T(v.z), T(v.w)};
}
__device__ __forceinline__ u32 bits_of(float value) { return __float_as_uint(value); }
__device__ __forceinline__ u32 bits_of(int value) { return static_cast<u32>(value); }

template <class T>
__device__ __forceinline__ void add(Vector4<T>& sum, const uint4& bits) {
    const Vector4<T> other = as_vector<T>(bits);
    sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
}
template <class T>
__device__ __forceinline__ uint4 to_bits(const Vector4<T>& v) {
    return make_uint4(bits_of(v.x), bits_of(v.y), bits_of(v.z), bits_of(v.w));
}

// Adds the warps' sums, of 16 the last four into 8..11, those into 4..7, those into 0..3, whose slots remain.
// A slot holds uint4 [tile][column group][q][g ^ 2q]: free of bank conflicts whether all q write or only q = 0.
template <class K, class Shared>
__device__ __forceinline__ void add_warps(typename Sum<K::arithmetic>::type (&sums)[STRIP_TILES][K::columns][4],
                                          Shared& shared, u32 rows, int warp, int lane) {
    const int q = lane & 3, slot = warp & (REDUCTION_SLOTS - 1), place = q * 8 + ((lane >> 2) ^ (2 * q));
    // Columns of tokens that do not exist are left out.
    const u32 tokens_per_quad = K::arithmetic == INTEGER ? 1 : 2;
#pragma unroll
    for (int round = WARPS / REDUCTION_SLOTS - 1; round >= 0; --round) {
        if (warp / REDUCTION_SLOTS == round) {
#pragma unroll
            for (int group = 0; group < K::columns; ++group) {
                if ((4 * group + q) * tokens_per_quad >= rows) continue;
#pragma unroll
                for (int tile = 0; tile < STRIP_TILES; ++tile) {
                    uint4& cell = shared.slots[slot][(tile * K::columns + group) * 32 + place];
                    auto& s = sums[tile][group];
                    Vector4<typename Sum<K::arithmetic>::type> sum{s[0], s[1], s[2], s[3]};
                    if (round != WARPS / REDUCTION_SLOTS - 1) add(sum, cell);
                    cell = to_bits(sum);
                }
            }
        }
        __syncthreads();
    }
}

// What undoes the rotation of one token's strip, and stores it.
template <int ARITHMETIC, class Shared>
__device__ __forceinline__ void finish_token(const LinearArgs& args, const ShardArgs& shard, u32 shard_index, u32 strip, u32 row,
                                             u32 token, const Shared& shared, int lane) {
    const float4 value = *reinterpret_cast<const float4*>(&shared.outputs[token][4 * lane]);
    float v[4] = {value.x, value.y, value.z, value.w};
    float scale = args.scales[shard_index * args.rows + row] * HADAMARD_SCALE;
    if constexpr (ARITHMETIC == INTEGER) {
        // outputs hold S - 510·Σa; the rest of the constant term is the same for every channel.
        const float rest = (MUL1_CENTRE * MUL1_SCALE + MUL1_OFFSET) * float(shared.token_sums[token]);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = fmaf(MUL1_SCALE, v[i], rest);
    }
    hadamard128(v, lane);
    const u32 column = strip * STRIP + 4 * lane;
    const uint2 packed = *reinterpret_cast<const uint2*>(shard.svh + column);
    const u16 svh[4] = {u16(packed.x), u16(packed.x >> 16), u16(packed.y), u16(packed.y >> 16)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 kept = column + i - shard.crop_start;  // wraps below the crop, so one comparison serves both ends
        if (kept >= shard.crop_size) continue;
        float result = v[i] * scale * half_to_float(svh[i]);
        if (args.bias != nullptr) result += load_element(args.bias, shard.out_column + kept, args.bias_type);
        store_element(args.out, row * args.out_stride + shard.out_column + kept, args.out_type, result);
    }
}

template <class K, class Shared>
__device__ __forceinline__ void finish_segment(typename Sum<K::arithmetic>::type (&sums)[STRIP_TILES][K::columns][4],
                                               const LinearArgs& args, const Segment& segment, Shared& shared, int warp, int lane) {
    using T = typename Sum<K::arithmetic>::type;
    const ShardArgs& shard = args.shards[segment.shard];
    const u32 row_tile = segment.strip % args.row_tiles, strip = segment.strip / args.row_tiles;
    const u32 first_row = row_tile * args.tile_rows;
    const u32 rows = min(args.tile_rows, args.rows - first_row);
    for (u32 token = warp; K::arithmetic == INTEGER && token < rows; token += WARPS) {
        int part = 0;
        for (u32 i = lane; i < args.parts; i += 32)
            part += args.sums[(segment.shard * args.rows + first_row + token) * args.parts + i];
        part = __reduce_add_sync(0xffffffffu, part);
        if (lane == 0) shared.token_sums[token] = part;
    }
    add_warps<K>(sums, shared, rows, warp, lane);

    constexpr u32 cells = STRIP_TILES * K::columns * 32, passes = (cells + THREADS - 1) / THREADS;
    Vector4<T> totals[passes] = {};
    const auto token_of = [](u32 cell) {
        const u32 group = (cell >> 5) % K::columns, q = cell >> 3 & 3;
        return K::arithmetic == INTEGER ? 4 * group + q : 8 * group + 2 * q;
    };
    const auto active = [&](u32 cell) { return cell < cells && token_of(cell) < rows; };
#pragma unroll
    for (u32 pass = 0; pass < passes; ++pass) {
        const u32 cell = pass * THREADS + threadIdx.x;
        if (!active(cell)) continue;
        totals[pass] = as_vector<T>(shared.slots[0][cell]);
#pragma unroll
        for (int slot = 1; slot < REDUCTION_SLOTS; ++slot) add(totals[pass], shared.slots[slot][cell]);
    }
    if (!segment.complete) {
        const u32 blocks = gridDim.x, units = args.total_units;
        const u32 first = block_of_unit(segment.strip_begin, blocks, units);
        const u32 last = block_of_unit(segment.strip_end - 1, blocks, units);
        const auto slot_of = [&](u32 block) {  // a block shares at most the strips at its two ends
            return 2 * block + (range_begin(block, blocks, units) < segment.strip_begin ? 1 : 0);
        };
        const auto partials = [&](u32 block) { return args.partials + static_cast<u64>(slot_of(block)) * cells; };
        uint4* mine = partials(blockIdx.x);
#pragma unroll
        for (u32 pass = 0; pass < passes; ++pass) {
            const u32 cell = pass * THREADS + threadIdx.x;
            if (active(cell)) __stcg(mine + cell, to_bits(totals[pass]));
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0)
            shared.last = atomicAdd(&args.counters[shard.first_strip + segment.strip], 1u) == last - first;
        __syncthreads();
        if (!shared.last) return;
        __threadfence();
#pragma unroll
        for (u32 pass = 0; pass < passes; ++pass) {
            const u32 cell = pass * THREADS + threadIdx.x;
            if (!active(cell)) continue;
            totals[pass] = as_vector<T>(__ldcg(partials(first) + cell));
            for (u32 block = first + 1; block <= last; ++block) add(totals[pass], __ldcg(partials(block) + cell));
        }
    }
#pragma unroll
    for (u32 pass = 0; pass < passes; ++pass) {
        const u32 cell = pass * THREADS + threadIdx.x;
        if (!active(cell)) continue;
        const u32 q = cell >> 3 & 3, g = (cell & 7) ^ (2 * q), token = token_of(cell);
        const u32 channel = 16 * ((cell >> 5) / K::columns) + g;
        const Vector4<T>& sum = totals[pass];
        if constexpr (K::arithmetic == INTEGER) {
            const i64 centre = static_cast<i64>(MUL1_CENTRE) * shared.token_sums[token];
            shared.outputs[token][channel] = static_cast<float>(static_cast<i64>(sum.x) * 128 + sum.y - centre);
            shared.outputs[token][channel + 8] = static_cast<float>(static_cast<i64>(sum.z) * 128 + sum.w - centre);
        } else {
            shared.outputs[token][channel] = sum.x;
            shared.outputs[token][channel + 8] = sum.z;
            if (token + 1 < rows) {
                shared.outputs[token + 1][channel] = sum.y;
                shared.outputs[token + 1][channel + 8] = sum.w;
            }
        }
    }
    __syncthreads();
    for (u32 t = warp; t < rows; t += WARPS)
        finish_token<K::arithmetic>(args, shard, segment.shard, strip, first_row + t, t, shared, lane);
    // The next segment writes `outputs` only after several barriers of its own, `token_sums` before any: order them.
    __syncthreads();
}

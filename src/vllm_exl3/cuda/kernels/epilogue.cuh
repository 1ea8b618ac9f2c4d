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
    float undo[TILE_ROWS];      // rows' scales
    int token_sums[TILE_ROWS];  // INTEGER: sum of the segment's activations
    u32 last;
};

// The part of a strip that one block computed.
struct Segment {
    u32 shard, strip;        // strip counts inside the shard
    u32 strip_begin, strip_end;
    bool complete;           // the block computed all of the strip
};

template <class T> struct Vector4 { T x, y, z, w; };

// What blocks exchange of one cell. INTEGER: two channels as 2^18·y/scale, an exact integer, the constant term included.
struct IntegerCell {
    i64 low, high;
    __device__ __forceinline__ void add(const uint4& bits) {
        low += static_cast<i64>(static_cast<u64>(bits.y) << 32 | bits.x);
        high += static_cast<i64>(static_cast<u64>(bits.w) << 32 | bits.z);
    }
    __device__ __forceinline__ uint4 bits() const { return make_uint4(u32(low), u32(low >> 32), u32(high), u32(high >> 32)); }
};
struct FloatCell {
    float x, y, z, w;
    __device__ __forceinline__ void add(const uint4& b) {
        x += __uint_as_float(b.x), y += __uint_as_float(b.y), z += __uint_as_float(b.z), w += __uint_as_float(b.w);
    }
    __device__ __forceinline__ uint4 bits() const {
        return make_uint4(__float_as_uint(x), __float_as_uint(y), __float_as_uint(z), __float_as_uint(w));
    }
};
template <int ARITHMETIC> struct Cell { using type = FloatCell; };
template <> struct Cell<INTEGER> { using type = IntegerCell; };

__device__ __forceinline__ FloatCell to_cell(const Vector4<float>& sum, int) { return {sum.x, sum.y, sum.z, sum.w}; }
__device__ __forceinline__ IntegerCell to_cell(const Vector4<int>& sum, int activations) {
    // y = scale·(k_inv·S + c·Σa) with k_inv = 1774·2^-18 and c = -905216·2^-18; S = 128·high + low.
    const i64 constant = static_cast<i64>(MUL1_OFFSET_18) * activations;
    return {(static_cast<i64>(sum.x) * 128 + sum.y) * MUL1_SCALE_18 + constant,
            (static_cast<i64>(sum.z) * 128 + sum.w) * MUL1_SCALE_18 + constant};
}

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
#pragma unroll 1
    for (int round = WARPS / REDUCTION_SLOTS - 1; round >= 0; --round) {
        if (warp / REDUCTION_SLOTS == round) {
            const bool first = round == WARPS / REDUCTION_SLOTS - 1;
#pragma unroll
            for (int group = 0; group < K::columns; ++group) {
                if ((4 * group + q) * tokens_per_quad >= rows) continue;
#pragma unroll
                for (int tile = 0; tile < STRIP_TILES; ++tile) {
                    uint4& cell = shared.slots[slot][(tile * K::columns + group) * 32 + place];
                    auto& s = sums[tile][group];
                    Vector4<typename Sum<K::arithmetic>::type> sum{s[0], s[1], s[2], s[3]};
                    if (!first) add(sum, cell);
                    cell = to_bits(sum);
                }
            }
        }
        __syncthreads();
    }
}

// What undoes the rotation of one token's strip, and stores it.
template <class Shared>
__device__ __forceinline__ void finish_token(const LinearArgs& args, const ShardArgs& shard, u32 strip, u32 row, u32 token,
                                             const Shared& shared, uint2 packed_svh, int lane) {
    const float4 value = *reinterpret_cast<const float4*>(&shared.outputs[token][4 * lane]);
    float v[4] = {value.x, value.y, value.z, value.w};
    const float scale = shared.undo[token] * HADAMARD_SCALE;
    hadamard128(v, lane);
    const u32 column = strip * STRIP + 4 * lane;
    const u16 svh[4] = {u16(packed_svh.x), u16(packed_svh.x >> 16), u16(packed_svh.y), u16(packed_svh.y >> 16)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 kept = column + i - shard.crop_start;  // wraps below the crop, so one comparison serves both ends
        if (kept >= shard.crop_size) continue;
        float result = v[i] * scale * half_to_float(svh[i]);
        if (args.bias != nullptr) result += load_element(args.bias, shard.out_column + kept, args.bias_type);
        store_element(args.out, row * args.out_stride + shard.out_column + kept, args.out_type, result);
    }
}

// Adds a segment up, and finishes its strip if nothing is missing any more. `token_sums(token)` gives, to every lane of the
// warp, the sum of the token's quantised activations over the segment; `undo(token)` its row's scale.
template <class K, class Shared, class TokenSums, class Undo>
__device__ __forceinline__ void finish_segment(typename Sum<K::arithmetic>::type (&sums)[STRIP_TILES][K::columns][4],
                                               const LinearArgs& args, const Segment& segment, const TokenSums& token_sums,
                                               const Undo& undo, Shared& shared, int warp, int lane) {
    using T = typename Sum<K::arithmetic>::type;
    using C = typename Cell<K::arithmetic>::type;
    const ShardArgs& shard = args.shards[segment.shard];
    const u32 first_row = blockIdx.y * args.tile_rows;
    const u32 rows = min(args.tile_rows, args.rows - first_row);
    // Asked for now, used at the very end.
    const uint2 svh = *reinterpret_cast<const uint2*>(shard.svh + segment.strip * STRIP + 4 * lane);
    for (u32 token = warp; token < rows; token += WARPS) {
        const int sum = K::arithmetic == INTEGER ? token_sums(token) : 0;
        const float scale = undo(token);
        if (lane == 0) shared.token_sums[token] = sum, shared.undo[token] = scale;
    }
    add_warps<K>(sums, shared, rows, warp, lane);

    constexpr u32 cells = STRIP_TILES * K::columns * 32, passes = (cells + THREADS - 1) / THREADS;
    C totals[passes] = {};
    const auto token_of = [](u32 cell) {
        const u32 group = (cell >> 5) % K::columns, q = cell >> 3 & 3;
        return K::arithmetic == INTEGER ? 4 * group + q : 8 * group + 2 * q;
    };
    const auto active = [&](u32 cell) { return cell < cells && token_of(cell) < rows; };
#pragma unroll
    for (u32 pass = 0; pass < passes; ++pass) {
        const u32 cell = pass * THREADS + threadIdx.x;
        if (!active(cell)) continue;
        totals[pass] = to_cell(as_vector<T>(shared.slots[0][cell]), shared.token_sums[token_of(cell)]);
#pragma unroll
        for (int slot = 1; slot < REDUCTION_SLOTS; ++slot)
            totals[pass].add(to_cell(as_vector<T>(shared.slots[slot][cell]), 0).bits());
    }
    if (!segment.complete) {
        const u32 first = block_of_unit(args, segment.strip_begin), last = block_of_unit(args, segment.strip_end - 1);
        const auto partials = [&](u32 block) {  // a block shares at most the strips at its two ends
            const u32 second = range_begin(args, block) < segment.strip_begin ? 1 : 0;
            return args.partials + static_cast<u64>(2 * (blockIdx.y * gridDim.x + block) + second) * args.partial_stride;
        };
        uint4* mine = partials(blockIdx.x);
#pragma unroll
        for (u32 pass = 0; pass < passes; ++pass) {
            const u32 cell = pass * THREADS + threadIdx.x;
            if (active(cell)) __stcg(mine + cell, totals[pass].bits());
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            // Wraps to zero at the last arrival: the counter is ready for the next launch.
            u32* counter = &args.counters[blockIdx.y * args.total_strips + shard.first_strip + segment.strip];
            shared.last = atomicInc(counter, last - first) == last - first;
        }
        __syncthreads();
        if (!shared.last) return;
        __threadfence();
#pragma unroll
        for (u32 pass = 0; pass < passes; ++pass) {
            const u32 cell = pass * THREADS + threadIdx.x;
            if (!active(cell)) continue;
            totals[pass] = {};
#pragma unroll 4
            for (u32 block = first; block <= last; ++block) totals[pass].add(__ldcg(partials(block) + cell));
        }
    }
#pragma unroll
    for (u32 pass = 0; pass < passes; ++pass) {
        const u32 cell = pass * THREADS + threadIdx.x;
        if (!active(cell)) continue;
        const u32 q = cell >> 3 & 3, g = (cell & 7) ^ (2 * q), token = token_of(cell);
        const u32 channel = 16 * ((cell >> 5) / K::columns) + g;
        const C& sum = totals[pass];
        if constexpr (K::arithmetic == INTEGER) {
            shared.outputs[token][channel] = static_cast<float>(sum.low) * 0x1p-18f;
            shared.outputs[token][channel + 8] = static_cast<float>(sum.high) * 0x1p-18f;
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
    for (u32 token = warp; token < rows; token += WARPS)
        finish_token(args, shard, segment.strip, first_row + token, token, shared, svh, lane);
    // The next segment writes `token_sums` and `undo` before any barrier of its own.
    __syncthreads();
}

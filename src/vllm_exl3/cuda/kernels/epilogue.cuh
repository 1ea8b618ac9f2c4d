// From the warps' partial sums of one strip to finished outputs.
//
// 1. The warps (k slices) are added in shared memory, as a binary tree.
// 2. A strip that several blocks share: a cluster's first block adds the others' sums from their shared memory; without
//    clusters every block stores its sums, and the block that arrives last adds them. Both in the order of k, and which
//    blocks share a strip depends on (N, K, blocks) alone: fp32 sums come out the same every time.
// 3. Output Hadamard, svh, bias, crop and cast, one warp a token.
#pragma once
#include "fragments.cuh"
#include "store.cuh"

constexpr int WARPS = INSTANCE_WARPS;  // 16, or fewer where shared memory is small
constexpr int THREADS = 32 * WARPS;
constexpr int STRIP_TILES = STRIP / 16;

// Shared memory of the epilogue; `columns` is the widest kind's.
template <int TILE_ROWS, int COLUMNS>
struct Epilogue {
    uint4 exchange[STRIP_TILES * COLUMNS * 32];  // the block's sums of a strip, read by its cluster
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

// Where sums lie: cell [tile][column group][q][g ^ 2q] holds a lane's four values. Only the q whose tokens exist have cells;
// the exchange of g keeps 16-byte accesses free of bank conflicts for 1, 2 and 4 of them.
template <class K>
struct Cells {
    u32 quads;  // of every four, those with tokens: 1, 2 or 4
    static constexpr u32 tokens_per_quad = K::arithmetic == INTEGER ? 1 : 2;

    __device__ __forceinline__ explicit Cells(u32 rows) {
        quads = K::columns > 1 || rows > 2 * tokens_per_quad ? 4 : rows > tokens_per_quad ? 2 : 1;
    }
    __device__ __forceinline__ u32 count() const { return STRIP_TILES * K::columns * 8 * quads; }
    __device__ __forceinline__ u32 index(u32 tile, u32 group, u32 q, u32 g) const {
        return (tile * K::columns + group) * 8 * quads + q * 8 + (g ^ (2 * q));
    }
    __device__ __forceinline__ u32 q(u32 cell) const { return cell >> 3 & (quads - 1); }
    __device__ __forceinline__ u32 g(u32 cell) const { return (cell & 7) ^ (2 * q(cell)); }
    __device__ __forceinline__ u32 group(u32 cell) const { return cell / (8 * quads) % K::columns; }
    __device__ __forceinline__ u32 tile(u32 cell) const { return cell / (8 * quads) / K::columns; }
    __device__ __forceinline__ u32 token(u32 cell) const { return (4 * group(cell) + q(cell)) * tokens_per_quad; }
};

// Brings the warps' sums to `slots`: one slot a warp, or the sums of warps w and w + WARPS/2 in slot w.
template <class K>
__device__ __forceinline__ void gather_warps(typename Sum<K::arithmetic>::type (&sums)[STRIP_TILES][K::columns][4], uint4* slots,
                                             u32 slot_count, u32 rows, int warp, int lane) {
    using T = typename Sum<K::arithmetic>::type;
    const Cells<K> cells(rows);
    const u32 q = lane & 3, g = lane >> 2;
    const bool one_round = slot_count == WARPS;
    uint4* slot = slots + (one_round ? warp : warp % (WARPS / 2)) * cells.count();
#pragma unroll 1
    for (int round = one_round ? 0 : 1; round >= 0; --round) {
        if (one_round || warp / (WARPS / 2) == round) {
#pragma unroll
            for (int group = 0; group < K::columns; ++group) {
                if ((4 * group + q) * Cells<K>::tokens_per_quad >= rows) continue;
#pragma unroll
                for (int tile = 0; tile < STRIP_TILES; ++tile) {
                    uint4& cell = slot[cells.index(tile, group, q, g)];
                    auto& s = sums[tile][group];
                    Vector4<T> sum{s[0], s[1], s[2], s[3]};
                    if (!one_round && round == 0) add(sum, cell);
                    cell = to_bits(sum);
                }
            }
        }
        __syncthreads();
    }
}

// One cell of all warps, added as a binary tree whose order does not depend on the number of slots.
template <class K>
__device__ __forceinline__ Vector4<typename Sum<K::arithmetic>::type> add_slots(const uint4* slots, u32 slot_count, u32 stride) {
    using T = typename Sum<K::arithmetic>::type;
    Vector4<T> part[WARPS / 2];
#pragma unroll
    for (int i = 0; i < WARPS / 2; ++i) {
        part[i] = as_vector<T>(slots[i * stride]);
        if (slot_count == WARPS) add(part[i], slots[(i + WARPS / 2) * stride]);
    }
#pragma unroll
    for (int n = WARPS / 4; n; n /= 2)
#pragma unroll
        for (int i = 0; i < n; ++i) add(part[i], to_bits(part[i + n]));
    return part[0];
}

// Adds a segment up, and finishes its strip if nothing is missing any more. `token_sums(token)` gives, to every lane of the
// warp, the sum of the token's quantised activations over the segment; `undo(token)` its row's scale.
template <class K, class Shared, class TokenSums, class Undo>
__device__ __forceinline__ void finish_segment(typename Sum<K::arithmetic>::type (&sums)[STRIP_TILES][K::columns][4],
                                               const LinearArgs& args, const Segment& segment, const TokenSums& token_sums,
                                               const Undo& undo, Shared& shared, uint4* slots, int warp, int lane) {
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
    gather_warps<K>(sums, slots, args.reduction_slots, rows, warp, lane);

    const Cells<K> cells(rows);
    constexpr u32 passes = (STRIP_TILES * K::columns * 32 + THREADS - 1) / THREADS;
    C totals[passes] = {};
    const auto active = [&](u32 cell) { return cell < cells.count() && cells.token(cell) < rows; };
#pragma unroll
    for (u32 pass = 0; pass < passes; ++pass) {
        const u32 cell = pass * THREADS + threadIdx.x;
        if (active(cell))
            totals[pass] = to_cell(add_slots<K>(slots + cell, args.reduction_slots, cells.count()), shared.token_sums[cells.token(cell)]);
    }
    if (!segment.complete && args.cluster > 1) {
        const u32 rank = blockIdx.x % args.cluster;
#pragma unroll
        for (u32 pass = 0; pass < passes; ++pass) {
            const u32 cell = pass * THREADS + threadIdx.x;
            if (active(cell)) shared.exchange[cell] = totals[pass].bits();
        }
        cluster_arrive(), cluster_wait();
        if (rank == 0) {
#pragma unroll
            for (u32 pass = 0; pass < passes; ++pass) {
                const u32 cell = pass * THREADS + threadIdx.x;
                if (!active(cell)) continue;
#pragma unroll 4
                for (u32 other = 1; other < args.cluster; ++other)
                    totals[pass].add(load_from_cluster(shared_address(&shared.exchange[cell]), other));
            }
        }
        cluster_arrive();  // the others' shared memory must outlive the reads
        if (rank != 0) {
            cluster_wait();
            return;
        }
    } else if (!segment.complete) {
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
        const u32 token = cells.token(cell), channel = 16 * cells.tile(cell) + cells.g(cell);
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
        store_token(args, shard, *reinterpret_cast<const float4*>(&shared.outputs[token][4 * lane]), shared.undo[token], svh,
                    segment.strip * STRIP + 4 * lane, first_row + token, lane);
    if (!segment.complete && args.cluster > 1) cluster_wait();
    // The next segment writes `token_sums` and `undo` before any barrier of its own.
    __syncthreads();
}

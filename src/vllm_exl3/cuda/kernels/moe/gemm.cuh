// The grouped trellis GEMM for few rows an expert: persistent blocks over a list of work that the device made.
//
// A work tile is one row block × one n block (128 output channels) of one projection, over all of k: nothing is shared between
// blocks, and a work tile's sums have one order. A block's warps are two halves of the n block × slices of k, each reading its tiles
// from global memory into registers one k block ahead. Bit rate, codebook and place of an expert's
// projection come from the table, so one launch serves layers that mix them.
#pragma once
#include "moe/launch.cuh"
#include "moe/arguments.cuh"
#include "moe/products.cuh"
#include "moe/tile_words.cuh"
#include "base/row_scale.cuh"

constexpr int MOE_WARPS = INSTANCE_WARPS, MOE_THREADS = 32 * MOE_WARPS, MOE_SLICES = MOE_WARPS / 2;
constexpr int MOE_TILES = 4;  // tile columns of half an n block
constexpr int MOE_N_BLOCK_TILES = 2 * MOE_TILES;

// Descales, sums of activations and slots of a work tile's rows.
template <int TILE_ROWS>
struct MoeRowInfo {
    float descale[TILE_ROWS];
    int sums[TILE_ROWS];
    u32 slots[TILE_ROWS];
};

template <int TILE_ROWS, int COLUMNS>
struct MoeShared {
    uint4 slices[MOE_SLICES][COLUMNS][MOE_N_BLOCK_TILES][32];
    float outputs[TILE_ROWS][HADAMARD_SIZE + 4];
    MoeRowInfo<TILE_ROWS> row_info[2];  // of two work tiles: some warps store rows of one while others begin the next
};

// The operands of one work tile.
struct MoeWorkTile {
    const MoeStage& stage;
    const Projection& projection;
    u32 rows, index, owner, n_block;  // index of the projection in its stage, and whose transformed rows it reads
};

// A lane's part of the B operand of one k block, as it is stored; `Operand` is what the tensor core takes.
template <class K>
struct MoeActivations {
    static constexpr int vectors = K::arithmetic == INTEGER ? 1 : 2;
    const uint4* row[K::columns];
    uint4 raw[K::columns][vectors];

    // Lane (g, q) reads column g of each group of 8: the 16 k of k-tile q.
    template <class RowInfo>
    __device__ __forceinline__ void seek(const MoeWorkTile& work_tile, const RowInfo& row_info, u32 k_block, int lane) {
        constexpr int planes = K::arithmetic == INTEGER ? 2 : 1;
#pragma unroll
        for (int group = 0; group < K::columns; ++group) {
            const u32 column = 8 * group + (lane >> 2), token = min(column / planes, work_tile.rows - 1);
            const u8* base = work_tile.stage.rows + static_cast<u64>(row_info.slots[token] * work_tile.stage.projections + work_tile.owner) * 2 * work_tile.stage.in_features;
            row[group] = reinterpret_cast<const uint4*>(base + column % planes * work_tile.stage.in_features) + vectors * (4 * k_block + (lane & 3));
        }
    }
    __device__ __forceinline__ void fetch() {
#pragma unroll
        for (int group = 0; group < K::columns; ++group)
#pragma unroll
            for (int i = 0; i < vectors; ++i) raw[group][i] = __ldcg(row[group] + i);
    }
    __device__ __forceinline__ void advance(u32 k_blocks) {
#pragma unroll
        for (int group = 0; group < K::columns; ++group) row[group] += 4 * vectors * k_blocks;
    }
    __device__ __forceinline__ void expand(u32 (&b)[K::columns][K::matrices]) const {
#pragma unroll
        for (int group = 0; group < K::columns; ++group) {
            u32 w[4 * vectors];
#pragma unroll
            for (int i = 0; i < vectors; ++i)
                w[4 * i] = raw[group][i].x, w[4 * i + 1] = raw[group][i].y, w[4 * i + 2] = raw[group][i].z, w[4 * i + 3] = raw[group][i].w;
#pragma unroll
            for (int m = 0; m < K::matrices; ++m) {
                const int k = 2 * (m >> 2) + 8 * (m >> 1 & 1) + (m & 1);  // matrix m = 4i + 2h + b holds k = 2i + 8h + b
                if constexpr (K::arithmetic == HALF) b[group][m] = w[m / 2 + 4 * (m % 2)];
                else if constexpr (K::arithmetic == INTEGER) b[group][m] = __byte_perm(w[k / 4], 0, 0x1111 * (k % 4));
                else b[group][m] = __byte_perm(w[k / 2], 0, k % 2 ? 0x3232 : 0x1010);
            }
        }
    }
};

__device__ __forceinline__ uint4 sum_bits(const float (&s)[4]) {
    return make_uint4(__float_as_uint(s[0]), __float_as_uint(s[1]), __float_as_uint(s[2]), __float_as_uint(s[3]));
}
__device__ __forceinline__ uint4 sum_bits(const int (&s)[4]) { return make_uint4(s[0], s[1], s[2], s[3]); }

template <int ARITHMETIC>
__device__ __forceinline__ u32 add_sums(u32 a, u32 b) {
    return ARITHMETIC == INTEGER ? a + b : __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
}
template <int ARITHMETIC>
__device__ __forceinline__ uint4 add_sums(const uint4& a, const uint4& b) {
    return make_uint4(add_sums<ARITHMETIC>(a.x, b.x), add_sums<ARITHMETIC>(a.y, b.y), add_sums<ARITHMETIC>(a.z, b.z),
                      add_sums<ARITHMETIC>(a.w, b.w));
}

// y before undo and the output Hadamard: y = k_inv·S + c·Σa with k_inv = 1774·2^-18, S = 128·high + low.
__device__ __forceinline__ float integer_value(u32 high, u32 low, int activations) {
    const i64 exact = (static_cast<i64>(static_cast<int>(high)) * 128 + static_cast<int>(low)) * MUL1_SCALE_18 +
        static_cast<i64>(MUL1_OFFSET_18) * activations;
    return static_cast<float>(exact) * 0x1p-18f;
}

// Adds the slices of one cell and puts its channels' sums where whole warps read a row.
template <class K, class Shared, int TILE_ROWS>
__device__ __forceinline__ void finish_cell(Shared& shared, const MoeRowInfo<TILE_ROWS>& row_info, u32 group, u32 tile, u32 lane) {
    constexpr int A = K::arithmetic;
    uint4 part[MOE_SLICES];
#pragma unroll
    for (int i = 0; i < MOE_SLICES; ++i) part[i] = shared.slices[i][group][tile][lane];
#pragma unroll
    for (int step = 1; step < MOE_SLICES; step *= 2)
#pragma unroll
        for (int i = 0; i < MOE_SLICES; i += 2 * step) part[i] = add_sums<A>(part[i], part[i + step]);
    const uint4 sum = part[0];
    const u32 channel = 16 * tile + (lane >> 2), q = lane & 3;
    if constexpr (A == INTEGER) {
        const u32 token = 4 * group + q;
        shared.outputs[token][channel] = integer_value(sum.x, sum.y, row_info.sums[token]);
        shared.outputs[token][channel + 8] = integer_value(sum.z, sum.w, row_info.sums[token]);
    } else {
        const u32 token = 8 * group + 2 * q;
        if (token >= TILE_ROWS) return;
        shared.outputs[token][channel] = __uint_as_float(sum.x);
        shared.outputs[token + 1][channel] = __uint_as_float(sum.y);
        shared.outputs[token][channel + 8] = __uint_as_float(sum.z);
        shared.outputs[token + 1][channel + 8] = __uint_as_float(sum.w);
    }
}

// Brings what the block's next work tile begins with nearer: its lines of the lists into the L1, its first weights into the L2.
// One warp, while this work tile's first weights are on their way.
__device__ __forceinline__ void look_ahead(const MoeArgs& args, const MoeStage& stage, u32 i, u32 lane) {
    const u32 n_blocks = stage.out_features / HADAMARD_SIZE, per_block = n_blocks * stage.projections;
    if (i >= args.list_sizes[0] * per_block) return;
    const Projection& projection = projection_of(args, args.blocks[i / per_block].expert, stage.first + i % per_block / n_blocks);
    const u32 tile_bytes = 16 * static_cast<u32>(projection.half_bits), rows = min(4u * MOE_SLICES, stage.in_features / 16);
    const u8* weights = reinterpret_cast<const u8*>(stage.trellis + projection.trellis) + i % n_blocks * MOE_N_BLOCK_TILES * tile_bytes;
    for (u32 at = 128 * lane; at < rows * MOE_N_BLOCK_TILES * tile_bytes; at += 128 * 32) {
        const u32 row = at / (MOE_N_BLOCK_TILES * tile_bytes);
        prefetch(weights + static_cast<u64>(row) * (n_blocks - 1) * MOE_N_BLOCK_TILES * tile_bytes + at);
    }
}

// The sums of one work tile, as far as `outputs`. While the first weights are on their way `begin` finds `row_info`, and `ahead` runs.
template <class K, class Shared, class RowInfo, class Begin, class Ahead>
__device__ __forceinline__ void multiply_work_tile(const MoeWorkTile& work_tile, Shared& shared, const RowInfo& row_info, int warp, int lane, const Begin& begin,
                                              const Ahead& ahead) {
    using T = typename Sum<K::arithmetic>::type;
    constexpr u32 tile_words = K::Window::tile_words;
    const u32 half = warp & 1, slice = warp >> 1, depth = work_tile.stage.in_features / BLOCK_K, tiles = work_tile.stage.out_features / 16;
    // A slice beyond the depth reads the last one's weights, and does not use them.
    const u32* at = reinterpret_cast<const u32*>(work_tile.stage.trellis + work_tile.projection.trellis) + TileWords<K::half_bits>::first(lane) +
        (static_cast<u64>(4 * min(slice, depth - 1) + (lane & 3)) * tiles + work_tile.n_block * MOE_N_BLOCK_TILES + half * MOE_TILES) * tile_words;
    u32 step = 4 * MOE_SLICES * tiles * tile_words;
    asm volatile("" : "+r"(step));  // or every round of the loop computes it again
    T sums[MOE_TILES][K::columns][4] = {};
    TileWords<K::half_bits> words[MOE_TILES];
#pragma unroll
    for (int tile = 0; tile < MOE_TILES; ++tile) words[tile].fetch(at + tile * tile_words, lane);
    begin();
    if (slice < depth) {
        MoeActivations<K> activations;
        activations.seek(work_tile, row_info, slice, lane);
        activations.fetch();
        ahead();
        for (u32 k_block = slice; k_block < depth; k_block += MOE_SLICES) {
            const bool more = k_block + MOE_SLICES < depth;
            u32 b[K::columns][K::matrices];
            activations.expand(b);
            if (more) activations.advance(MOE_SLICES), activations.fetch(), at += step;
#pragma unroll
            for (int tile = 0; tile < MOE_TILES; ++tile) {
                u32 string[K::Window::words];
                words[tile].string(string, lane);
                multiply_tile<K>(sums[tile], string, b);
                if (more) words[tile].fetch(at + tile * tile_words, lane);
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < MOE_TILES; ++tile)
#pragma unroll
        for (int group = 0; group < K::columns; ++group)
            shared.slices[slice][group][half * MOE_TILES + tile][lane] = sum_bits(sums[tile][group]);
    __syncthreads();
    if (warp < MOE_N_BLOCK_TILES)
#pragma unroll
        for (int group = 0; group < K::columns; ++group) finish_cell<K>(shared, row_info, group, warp, lane);
    __syncthreads();
}

template <class... Ks> struct MoeKinds {
    static constexpr int columns() {
        int widest = 0;
        ((widest = Ks::columns > widest ? Ks::columns : widest), ...);
        return widest;
    }
};

template <class... Ks, class... Arguments>
__device__ __forceinline__ void dispatch_work_tile(MoeKinds<Ks...>, const MoeWorkTile& work_tile, Arguments&&... arguments) {
    ((work_tile.projection.half_bits == Ks::half_bits && work_tile.projection.codebook == Ks::codebook
          ? multiply_work_tile<Ks>(work_tile, arguments...) : void()), ...);
}

// Output Hadamard, scales and bias of one row.
__device__ __forceinline__ void store_row(const MoeWorkTile& work_tile, const float* values, float descale, u32 slot, int lane) {
    const MoeStage& stage = work_tile.stage;
    const u32 channel = work_tile.n_block * HADAMARD_SIZE + 4 * lane;
    const float4 value = *reinterpret_cast<const float4*>(values + 4 * lane);
    const uint2 raw = *reinterpret_cast<const uint2*>(stage.svh + work_tile.projection.svh + channel);
    const u16 svh[4] = {u16(raw.x), u16(raw.x >> 16), u16(raw.y), u16(raw.y >> 16)};
    float v[4] = {value.x, value.y, value.z, value.w};
    hadamard128(v, lane);
    const float scale = descale * HADAMARD_SCALE;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[i] = v[i] * scale * half_to_float(svh[i]);
        if (stage.bias != nullptr && channel + i < stage.out_width) v[i] += stage.bias[work_tile.projection.bias + channel + i];
    }
    float* out = static_cast<float*>(stage.out) + (static_cast<u64>(slot) * stage.projections + work_tile.index) * stage.out_features + channel;
    *reinterpret_cast<float4*>(out) = make_float4(v[0], v[1], v[2], v[3]);
}

template <int TILE_ROWS, class List>
__device__ __forceinline__ void moe_gemm(const MoeArgs& args) {
    __shared__ MoeShared<TILE_ROWS, List::columns()> shared;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const MoeStage& stage = args.stages[args.stage];
    bool begun = args.stage == 0;
    if (begun) begin_launch();  // the launch before made the lists; in the second stage the first work tile begins meanwhile
    const u32 n_blocks = stage.out_features / HADAMARD_SIZE, per_block = n_blocks * stage.projections, work_tiles = args.list_sizes[0] * per_block;
    u32 parity = 0;
    for (u32 i = blockIdx.x; i < work_tiles; i += gridDim.x, parity ^= 1) {
        const RowBlock block = args.blocks[i / per_block];
        const u32 index = i % per_block / n_blocks, owner = rows_owner(args, stage, block.expert, index);
        const MoeWorkTile work_tile{stage, projection_of(args, block.expert, stage.first + index), block.rows, index, owner, i % n_blocks};
        MoeRowInfo<TILE_ROWS>& row_info = shared.row_info[parity];
        const auto begin = [&] {
            if (!begun) begin_launch(), begun = true;
            if (threadIdx.x < TILE_ROWS) {
                const u32 slot = args.sorted_slots[block.first + min(threadIdx.x, block.rows - 1)], at = slot * stage.projections + owner;
                row_info.slots[threadIdx.x] = slot;
                row_info.descale[threadIdx.x] = stage.descale[at];
                row_info.sums[threadIdx.x] = stage.sums[at];
            }
            __syncthreads();
        };
        const auto ahead = [&] {
            if (warp == 0) look_ahead(args, stage, i + gridDim.x, lane);
        };
        dispatch_work_tile(List{}, work_tile, shared, row_info, warp, lane, begin, ahead);
        // Nobody writes what is read here before all have left it: the next work tile's first barrier is in between.
        for (u32 row = warp; row < block.rows; row += MOE_WARPS)
            store_row(work_tile, shared.outputs[row], row_info.descale[row], row_info.slots[row], lane);
    }
    if (!begun) begin_launch();
}

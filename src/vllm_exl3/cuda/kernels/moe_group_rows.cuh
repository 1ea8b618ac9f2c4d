// The input transform of grouped rows by tensor cores, sixteen rows at a time.
//
// H128 is a product of four two-point transforms over bits 0, 1, 3 and 4 of the channel's number and three over bits 2, 5
// and 6. The first four are one 16×16 matrix of ±1, multiplied by mma.sync; the other three are additions of a lane's own
// values, since the eight products of a 128-block differ in just these bits. Inputs are rounded to fp16 before the
// transform; all else is float32.
#pragma once
#include "mma.cuh"
#include "moe_rows.cuh"

constexpr int GROUP_THREADS = 256, GROUP_WARPS = GROUP_THREADS / 32;

// The lane's part of the matrix of signs, as the B operand of both n-tiles: k-slots are (bits 3, 4 by the lane's q; bits
// 0, 1 by the slot), columns are bits 0, 1, 3, and the n-tile is bit 4.
struct Signs {
    u32 b[2][2];
    __device__ __forceinline__ explicit Signs(int lane) {
        const u32 column = lane >> 2, q = lane & 3;
#pragma unroll
        for (u32 tile = 0; tile < 2; ++tile)
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                u32 word = 0;
#pragma unroll
                for (u32 low = 0; low < 2; ++low) {
                    const u32 in = low | half << 1 | q << 2, out = column | tile << 3;
                    word |= (__popc(in & out) & 1 ? 0xbc00u : 0x3c00u) << (16 * low);
                }
                b[tile][half] = word;
            }
    }
};

// Eight neighbouring channels of a token; beyond the width they are zero. FAST: 16-bit values, all aligned to 16 bytes, so that
// no branch stands between loads.
template <bool FAST>
__device__ __forceinline__ void load_channels(uint4& raw, float (&v)[8], const MoeArgs& args, u32 width, i64 row, u32 channel) {
    if constexpr (FAST) {
        raw = channel < width ? *reinterpret_cast<const uint4*>(static_cast<const u16*>(args.x) + row + channel) : make_uint4(0, 0, 0, 0);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = channel + i < width ? load_element(args.x, row + channel + i, args.x_type) : 0.0f;
    }
}

template <bool FAST>
__device__ __forceinline__ void convert_channels(float (&v)[8], const uint4& raw, u32 type) {
    if constexpr (FAST) {
        const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
        if (type == F16) {
#pragma unroll
            for (int i = 0; i < 4; ++i) v[2 * i] = half_to_float(u16(words[i])), v[2 * i + 1] = half_to_float(u16(words[i] >> 16));
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) v[2 * i] = __uint_as_float(words[i] << 16), v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
}

__device__ __forceinline__ void convert_scales(float (&v)[8], const uint4& raw) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) v[2 * i] = half_to_float(u16(words[i])), v[2 * i + 1] = half_to_float(u16(words[i] >> 16));
}

// One row of a chunk as its two readers see it.
struct ChunkRow {
    i64 at;        // of the token in x
    float weight;  // the routing weight where it goes on the input, else 1
};

// A lane's part of a 128-block of its two rows: lane (g, q) has rows g and g + 8, channels 32u + 8q .. 32u + 8q + 7.
template <bool FAST>
struct ChunkInput {
    uint4 raw[4][2], scales[4];
    float values[FAST ? 1 : 4][2][8];

    __device__ __forceinline__ void load(const MoeArgs& args, u32 width, const ChunkRow (&rows)[2], const u16* suh, u32 block, int lane) {
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const u32 channel = block * STRIP + 32 * u + 8 * (lane & 3);
            scales[u] = *reinterpret_cast<const uint4*>(suh + channel);
#pragma unroll
            for (int r = 0; r < 2; ++r) load_channels<FAST>(raw[u][r], values[FAST ? 0 : u][r], args, width, rows[r].at, channel);
        }
    }
    // x (times its routing weight) · suh.
    __device__ __forceinline__ void scaled(float (&v)[2][8], int u, const MoeArgs& args, const ChunkRow (&rows)[2]) const {
        float scale[8];
        convert_scales(scale, scales[u]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if constexpr (FAST) convert_channels<FAST>(v[r], raw[u][r], args.x_type);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[r][i] = (FAST ? v[r][i] : values[FAST ? 0 : u][r][i]) * rows[r].weight * scale[i];
        }
    }
};

// The A operand of product b2 of a group of 32 channels.
__device__ __forceinline__ void pack_rows(u32 (&a)[4], const float (&v)[2][8], const float (&factors)[2], int b2) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = 4 * b2 + 2 * half;
            a[r + 2 * half] = half_pair(v[r][i] * factors[r], v[r][i + 1] * factors[r]);
        }
}

// The three steps over a lane's own values. After them sums[2u + b2][tile][i] is row g (i < 2) or g + 8 of the channel whose
// bits 6, 5 are u, bit 4 is the tile, bits 3 and 1 are q's, bit 2 is b2 and bit 0 is i's.
__device__ __forceinline__ void rotate_rest(float (&sums)[8][2][4]) {
#pragma unroll
    for (int step = 1; step < 8; step *= 2)
#pragma unroll
        for (int t = 0; t < 8; ++t)
            if (!(t & step))
#pragma unroll
                for (int tile = 0; tile < 2; ++tile)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float low = sums[t][tile][i], high = sums[t + step][tile][i];
                        sums[t][tile][i] = low + high, sums[t + step][tile][i] = low - high;
                    }
}

__device__ __forceinline__ void multiply_signs(float (&sums)[2][4], const u32 (&a)[4], const Signs& signs) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
        float(&d)[4] = sums[tile];
        d[0] = d[1] = d[2] = d[3] = 0.0f;
        mma_half(d, a, signs.b[tile][0], signs.b[tile][1]);
    }
}

// Rounds and stores the rotated block of both rows: per row and (unit, bit 2) sixteen bytes, one word for each k-tile of the
// unit. Gives every lane of a quad the sums of what was stored, which the tensor cores add up with a matrix of ones.
__device__ __forceinline__ void store_rows(float (&totals)[2], u8* group, u32 unit_bytes, const float (&sums)[8][2][4], u32 rows,
                                           u32 block, int lane) {
    const u32 g = lane >> 2, q = lane & 3;
    float ones[4] = {};
#pragma unroll
    for (u32 unit = 0; unit < 2; ++unit)
#pragma unroll
        for (u32 b2 = 0; b2 < 2; ++b2) {
            u32 words[2][4];
#pragma unroll
            for (u32 tile = 0; tile < 4; ++tile) {  // bits 5 and 4
                const float(&d)[4] = sums[2 * (2 * unit + tile / 2) + b2][tile % 2];
                words[0][tile] = half_pair(d[0], d[1]), words[1][tile] = half_pair(d[2], d[3]);
            }
#pragma unroll
            for (u32 tile = 0; tile < 4; tile += 2) {
                const u32 a[4] = {words[0][tile], words[1][tile], words[0][tile + 1], words[1][tile + 1]};
                mma_half(ones, a, 0x3c003c00u, 0x3c003c00u);
            }
            const u32 matrix = 2 * (2 * b2 + (q & 1)) + (q >> 1);
            u8* at = group + static_cast<u64>(2 * block + unit) * unit_bytes + matrix * 128 + g * 16;
#pragma unroll
            for (u32 r = 0; r < 2; ++r)
                if (8 * r < rows)
                    *reinterpret_cast<uint4*>(at + r * GROUP_BYTES) = make_uint4(words[r][0], words[r][1], words[r][2], words[r][3]);
        }
    totals[0] = ones[0], totals[1] = ones[2];
}

// The two rows of a lane, which are row g and g + 8 of a chunk, and where the chunk is stored.
struct Chunk {
    u32 slots[2], count, unit_bytes, place;  // place: the lane's first row
    u8* group;

    __device__ __forceinline__ Chunk(const MoeArgs& args, const MoeStage& stage, const RowBlock& block, u32 index, int lane) {
        count = block.rows, place = lane >> 2;
#pragma unroll
        for (u32 r = 0; r < 2; ++r) slots[r] = args.order[block.first + min(place + 8 * r, count - 1)];
        const u32 start = args.starts[block.expert];
        unit_bytes = (args.starts[block.expert + 1] - start) * UNIT_IN * 2;
        group = stage.rows + (static_cast<u64>(index) * args.padded_rows + start) * 2 * stage.in_features +
            (block.first - start) / GROUP_ROWS * GROUP_BYTES;
    }
    // Once for a block, when all warps have left their 128-blocks' sums: what undoes the rows' scales, and the rows' sums.
    __device__ __forceinline__ void store_row_facts(const MoeStage& stage, u32 index, const RowScale (&scales)[2],
                                                    const float* totals) const {
        __syncthreads();
        if (threadIdx.x >= 32 || (threadIdx.x & 3)) return;
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            if (place + 8 * r >= count) continue;
            const u32 at = slots[r] * stage.projections + index;
            float sum = 0.0f;
            for (u32 block = 0; block < stage.in_features / STRIP; ++block) sum += totals[block * CHUNK_ROWS + place + 8 * r];
            stage.undo[at] = scales[r].undo;
            reinterpret_cast<float*>(stage.sums)[at] = sum;
        }
    }
    __device__ __forceinline__ void keep(float* totals, const float (&sums)[2], u32 block, int lane) const {
        if ((lane & 3) == 0) totals[block * CHUNK_ROWS + place] = sums[0], totals[block * CHUNK_ROWS + place + 8] = sums[1];
    }
};

// The exponent, as float bits have it, of the power of two in a row's factor: HADAMARD_SCALE lies in [2^-4, 2^-3).
__device__ __forceinline__ u32 factor_exponent(const RowScale& scale) { return (__float_as_uint(scale.factor) >> 23) + 4; }

// First stage. One thread block: one chunk, all channels of one projection. x is read twice: for the
// rows' largest values, and to be transformed.
template <bool FAST>
__device__ __forceinline__ void transform_inputs(const MoeArgs& args, const MoeStage& stage, const RowBlock& block, u32 index,
                                                 const Signs& signs, u32* largest, float* totals) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const u32 blocks = stage.in_features / STRIP;
    const u16* suh = stage.suh + projection_of(args, block.expert, stage.first + index).suh;
    const Chunk chunk(args, stage, block, index, lane);
    ChunkRow rows[2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
        rows[r].at = chunk.slots[r] / args.top_k * args.x_stride;
        rows[r].weight = args.weight_on_input ? args.weights[chunk.slots[r]] : 1.0f;
    }
    if (threadIdx.x < CHUNK_ROWS) largest[threadIdx.x] = 0;
    __syncthreads();
    u32 bits[2] = {};
    ChunkInput<FAST> input;
    for (u32 b = warp; b < blocks; b += GROUP_WARPS) {
        input.load(args, stage.in_width, rows, suh, b, lane);
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            float v[2][8];
            input.scaled(v, u, args, rows);
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int i = 0; i < 8; ++i) bits[r] = max(bits[r], __float_as_uint(fabsf(v[r][i])));
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        bits[r] = max(bits[r], __shfl_xor_sync(0xffffffffu, bits[r], 1));
        bits[r] = max(bits[r], __shfl_xor_sync(0xffffffffu, bits[r], 2));
        if ((lane & 3) == 0) atomicMax(&largest[chunk.place + 8 * r], bits[r]);
    }
    __syncthreads();
    const RowScale scales[2] = {row_scale(HALF, largest[chunk.place]), row_scale(HALF, largest[chunk.place + 8])};
    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) factors[r] = __uint_as_float(factor_exponent(scales[r]) << 23);
    for (u32 b = warp; b < blocks; b += GROUP_WARPS) {
        float sums[8][2][4];
        input.load(args, stage.in_width, rows, suh, b, lane);
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            float v[2][8];
            input.scaled(v, u, args, rows);
#pragma unroll
            for (int b2 = 0; b2 < 2; ++b2) {
                u32 a[4];
                pack_rows(a, v, factors, b2);
                multiply_signs(sums[2 * u + b2], a, signs);
            }
        }
        rotate_rest(sums);
#pragma unroll
        for (int t = 0; t < 8; ++t)
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[t][i / 4][i % 4] *= HADAMARD_SCALE;
        float stored[2];
        store_rows(stored, chunk.group, chunk.unit_bytes, sums, chunk.count, b, lane);
        chunk.keep(totals, stored, b, lane);
    }
    chunk.store_row_facts(stage, index, scales, totals);
    __syncthreads();  // shared memory is used again
}

// Eight neighbouring outputs of the first stage.
__device__ __forceinline__ void load_hidden(float (&v)[8], const MoeArgs& args, u32 slot, u32 index, u32 channel) {
    const MoeStage& first = args.stages[0];
    const u64 at = (static_cast<u64>(slot) * first.projections + index) * first.out_features + channel;
    const uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const u16*>(first.out) + at);
    const float scale = first.out_scales[at / STRIP];
    convert_scales(v, raw);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= scale;
}

// What the second stage's transform keeps in shared memory between its two passes: values in fp16, each 32 channels of a row
// with a power of two of their own, as the A operand of their products; and those channels' largest values.
struct Stash {
    uint4* fragments;  // [128-block][32 channels][b2][lane]
    u32* largest;      // [128-block][32 channels][CHUNK_ROWS]
    __device__ __forceinline__ Stash(u8* memory, u32 blocks)
        : fragments(reinterpret_cast<uint4*>(memory)), largest(reinterpret_cast<u32*>(memory + blocks * 4 * 2 * 32 * 16)) {}
};

// 2^e at the largest magnitude becomes 2^14.
__device__ __forceinline__ u32 local_exponent(u32 bits) { return 268u - min(max(bits >> 23, 15u), 254u); }

// Second stage: activation, then as above. What was activated is kept, not computed twice.
__device__ __forceinline__ void transform_hidden(const MoeArgs& args, const MoeStage& stage, const RowBlock& block,
                                                 const Signs& signs, u32* largest, float* totals, u8* memory) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const u32 blocks = stage.in_features / STRIP, gated = args.stages[0].projections - 1;
    const u16* suh = stage.suh + projection_of(args, block.expert, stage.first).suh;
    const Chunk chunk(args, stage, block, 0, lane);
    const Stash stash(memory, blocks);
    if (threadIdx.x < CHUNK_ROWS) largest[threadIdx.x] = 0;
    __syncthreads();
    u32 most[2] = {};
#pragma unroll 1
    for (u32 part = warp; part < 4 * blocks; part += GROUP_WARPS) {  // 32 channels
        const u32 channel = 32 * part + 8 * (lane & 3);
        float scale[8], v[2][8], factors[2];
        convert_scales(scale, *reinterpret_cast<const uint4*>(suh + channel));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float gate[8], up[8];
            load_hidden(gate, args, chunk.slots[r], 0, channel);
            load_hidden(up, args, chunk.slots[r], gated, channel);
            activate_all(args.activation, gate, up, args.alpha, args.beta, args.limit);
            u32 bits = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                v[r][i] = channel + i < stage.in_width ? gate[i] * scale[i] : 0.0f;
                bits = max(bits, __float_as_uint(fabsf(v[r][i])));
            }
            bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 1));
            bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 2));
            factors[r] = __uint_as_float(local_exponent(bits) << 23);
            most[r] = max(most[r], bits);
            if ((lane & 3) == 0) stash.largest[part * CHUNK_ROWS + chunk.place + 8 * r] = bits;
        }
#pragma unroll
        for (int b2 = 0; b2 < 2; ++b2) {
            u32 a[4];
            pack_rows(a, v, factors, b2);
            stash.fragments[(2 * part + b2) * 32 + lane] = make_uint4(a[0], a[1], a[2], a[3]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
        if ((lane & 3) == 0) atomicMax(&largest[chunk.place + 8 * r], most[r]);
    __syncthreads();
    const RowScale scales[2] = {row_scale(HALF, largest[chunk.place]), row_scale(HALF, largest[chunk.place + 8])};
    for (u32 b = warp; b < blocks; b += GROUP_WARPS) {
        float sums[8][2][4];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            float factors[2];  // from the channels' own power of two to the row's
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int exponent = static_cast<int>(factor_exponent(scales[r])) + 127 -
                    static_cast<int>(local_exponent(stash.largest[(4 * b + u) * CHUNK_ROWS + chunk.place + 8 * r]));
                factors[r] = exponent > 0 ? __uint_as_float(min(exponent, 254) << 23) * HADAMARD_SCALE : 0.0f;
            }
#pragma unroll
            for (int b2 = 0; b2 < 2; ++b2) {
                const uint4 raw = stash.fragments[(2 * (4 * b + u) + b2) * 32 + lane];
                const u32 a[4] = {raw.x, raw.y, raw.z, raw.w};
                multiply_signs(sums[2 * u + b2], a, signs);
#pragma unroll
                for (int i = 0; i < 8; ++i) sums[2 * u + b2][i / 4][i % 4] *= factors[i % 4 / 2];
            }
        }
        rotate_rest(sums);
        float stored[2];
        store_rows(stored, chunk.group, chunk.unit_bytes, sums, chunk.count, b, lane);
        chunk.keep(totals, stored, b, lane);
    }
    chunk.store_row_facts(stage, 0, scales, totals);
    __syncthreads();  // shared memory is used again
}

// H128 of sixteen rows at once, by tensor cores.
//
// H128 is a product of four two-point transforms over bits 0, 1, 3 and 4 of the channel's number and three over bits 2, 5
// and 6. The first four are one 16×16 matrix of ±1, multiplied by mma.sync; the other three are additions of a lane's own
// values, since the eight products of a 128-block differ in just these bits. Inputs are rounded to fp16 before the
// transform; all else is float32.
#pragma once
#include "base/hadamard.cuh"
#include "base/mma.cuh"
#include "moe/rows.cuh"

// The lane's part of the matrix of signs, as the B operand of both n-tiles. Which four channel bits they are, a nibble each:
// `in` of a k-slot (low half of a word or high, first words or last, lane bits 0 and 1), `out` of a column and the n-tile.
struct Signs {
    u32 b[2][2];
    __device__ __forceinline__ explicit Signs(int lane, u32 in = 0x4310, u32 out = 0x4310) {
        const u32 column = lane >> 2, q = lane & 3;
#pragma unroll
        for (u32 tile = 0; tile < 2; ++tile)
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                u32 word = 0;
#pragma unroll
                for (u32 low = 0; low < 2; ++low) {
                    const u32 both = channel_bits(low | half << 1 | q << 2, in) & channel_bits(column | tile << 3, out);
                    word |= (__popc(both) & 1 ? 0xbc00u : 0x3c00u) << (16 * low);
                }
                b[tile][half] = word;
            }
    }

private:
    static __device__ __forceinline__ u32 channel_bits(u32 value, u32 names) {
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) bits |= (value >> i & 1) << (names >> 4 * i & 15);
        return bits;
    }
};

// Eight neighbouring 16-bit values in float32.
__device__ __forceinline__ void convert_channels(float (&v)[8], const uint4& raw, u32 type) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
    if (type == F16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[2 * i] = half_to_float(u16(words[i])), v[2 * i + 1] = half_to_float(u16(words[i] >> 16));
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[2 * i] = __uint_as_float(words[i] << 16), v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}
__device__ __forceinline__ void convert_scales(float (&v)[8], const uint4& raw) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) v[2 * i] = half_to_float(u16(words[i])), v[2 * i + 1] = half_to_float(u16(words[i] >> 16));
}

// The three steps over a lane's own values. After them sums[2u + b2][tile][i] is row g (i < 2) or g + 8 of the channel whose
// bits 6, 5 are u, bit 4 is the tile, bits 3 and 1 are q's, bit 2 is b2 and bit 0 is i's.
__device__ __forceinline__ void rotate_rest(float (&sums)[8][2][4]) { hadamard8(sums); }

__device__ __forceinline__ void multiply_signs(float (&sums)[2][4], const u32 (&a)[4], const Signs& signs) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
        float(&d)[4] = sums[tile];
        d[0] = d[1] = d[2] = d[3] = 0.0f;
        mma_half(d, a, signs.b[tile][0], signs.b[tile][1]);
    }
}

// A lane's part of a 128-block of x for its two rows, times the rows' factors, in fp16: lane (g, q) has rows g and g + 8,
// channels 32u + 8q .. 32u + 8q + 7; beyond the width they are zero.
struct ChunkInput {
    u32 halves[4][2][4];

    __device__ __forceinline__ void load(const MoeArgs& args, const i64 (&rows)[2], const float (&factors)[2], u32 first) {
#pragma unroll
        for (int u = 0; u < 4; ++u)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float v[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const u32 channel = first + 32 * u + i;
                    v[i] = channel < args.stages[0].in_width ? load_element(args.x, rows[r] + channel, args.x_type) : 0.0f;
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) halves[u][r][i] = half_pair(v[2 * i] * factors[r], v[2 * i + 1] * factors[r]);
            }
    }
    // Times suh, rotated, but for `rotate_rest`.
    __device__ __forceinline__ void rotate(float (&sums)[8][2][4], const u16* suh, u32 first, const Signs& signs) const {
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const uint4 raw = *reinterpret_cast<const uint4*>(suh + first + 32 * u);
            const u32 scales[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int b2 = 0; b2 < 2; ++b2) {
                u32 a[4];
#pragma unroll
                for (int r = 0; r < 2; ++r)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        a[r + 2 * half] = multiply_halves(halves[u][r][2 * b2 + half], scales[2 * b2 + half]);
                multiply_signs(sums[2 * u + b2], a, signs);
            }
        }
    }
};

// Rounds and stores the rotated block of both rows: per row and (k block, bit 2) sixteen bytes, one word for each k-tile of the
// k block. Gives every lane of a quad the sums of what was stored, which the tensor cores add up with a matrix of ones.
__device__ __forceinline__ void store_rows(float (&totals)[2], u8* group, u32 k_block_bytes, const float (&sums)[8][2][4], u32 rows,
                                           u32 block, int lane) {
    const u32 g = lane >> 2, q = lane & 3;
    float ones[4] = {};
#pragma unroll
    for (u32 k_block = 0; k_block < 2; ++k_block)
#pragma unroll
        for (u32 b2 = 0; b2 < 2; ++b2) {
            u32 words[2][4];
#pragma unroll
            for (u32 tile = 0; tile < 4; ++tile) {  // bits 5 and 4
                const float(&d)[4] = sums[2 * (2 * k_block + tile / 2) + b2][tile % 2];
                words[0][tile] = half_pair(d[0], d[1]), words[1][tile] = half_pair(d[2], d[3]);
            }
#pragma unroll
            for (u32 tile = 0; tile < 4; tile += 2) {
                const u32 a[4] = {words[0][tile], words[1][tile], words[0][tile + 1], words[1][tile + 1]};
                mma_half(ones, a, 0x3c003c00u, 0x3c003c00u);
            }
            const u32 matrix = 2 * (2 * b2 + (q & 1)) + (q >> 1);
            u8* at = group + static_cast<u64>(2 * block + k_block) * k_block_bytes + matrix * 128 + g * 16;
#pragma unroll
            for (u32 r = 0; r < 2; ++r)
                if (8 * r < rows)
                    *reinterpret_cast<uint4*>(at + r * GROUP_BYTES) = make_uint4(words[r][0], words[r][1], words[r][2], words[r][3]);
        }
    totals[0] = ones[0], totals[1] = ones[2];
}

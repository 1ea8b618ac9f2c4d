#include "decode.h"

#include <algorithm>
#include <array>
#include <memory>

#include "format.h"
#include "parallel.h"

namespace exl3 {
namespace {

constexpr int64_t STATES = 65536;

std::unique_ptr<uint16_t[]> make_table(int codebook) {
    std::unique_ptr<uint16_t[]> table(new uint16_t[STATES]);
    for (int64_t state = 0; state < STATES; state++) table[state] = decode_state(codebook, uint32_t(state));
    return table;
}

void store_as(int dtype, void* out, int64_t i, float value) {
    if (dtype == FLOAT32) {
        static_cast<float*>(out)[i] = value;
    } else {
        static_cast<uint16_t*>(out)[i] = dtype == FLOAT16 ? float_to_half(value) : float_to_bfloat(value);
    }
}

// One 128 x 128 block, [row][column].
using Square = std::array<float, BLOCK * BLOCK>;

void decode_block(const exl3_shard& shard, const uint32_t* tiles, int64_t row_block, int64_t column_block,
                  Square& out) {
    const int half_bits = int(shard.half_bits);
    const uint16_t* table = codebook_table(int(shard.codebook));
    const int64_t columns = shard.out_features / TILE;
    constexpr int side = BLOCK / TILE;
    for (int a = 0; a < side; a++) {
        for (int c = 0; c < side; c++) {
            const int64_t index = (row_block * side + a) * columns + column_block * side + c;
            const uint32_t* tile = tiles + index * tile_dwords(half_bits);
            for (int t = 0; t < TILE_WEIGHTS; t++) {
                const int row = a * TILE + position_row(t), column = c * TILE + position_column(t);
                out[size_t(row * BLOCK + column)] = half_to_float(table[window(tile, half_bits, t)]);
            }
        }
    }
}

void transpose(Square& square) {
    for (int i = 0; i < BLOCK; i++) {
        for (int j = 0; j < i; j++) std::swap(square[size_t(i * BLOCK + j)], square[size_t(j * BLOCK + i)]);
    }
}

}  // namespace

const uint16_t* codebook_table(int codebook) {
    static const std::unique_ptr<uint16_t[]> tables[] = {make_table(INST3), make_table(MCG), make_table(MUL1)};
    return tables[codebook].get();
}

void dequantize(const Kernels& kernels, const exl3_shard* shards, int count, const uint16_t* trellis,
                const uint16_t* suh, const uint16_t* svh, bool rotated, int dtype, void* out, int64_t stride,
                int threads) {
    int64_t output = 0;
    for (int i = 0; i < count; i++) {
        const exl3_shard& shard = shards[i];
        const uint32_t* tiles = reinterpret_cast<const uint32_t*>(trellis);
        const int64_t columns = shard.out_features / BLOCK;
        parallel_for(shard.in_features / BLOCK * columns, threads, [&](int64_t unit, int) {
            const int64_t row_block = unit / columns, column_block = unit % columns;
            const int64_t begin = std::max(column_block * BLOCK, shard.crop_start);
            const int64_t end = std::min(column_block * BLOCK + BLOCK, shard.crop_start + shard.crop_size);
            if (begin >= end) return;
            const auto square = std::make_unique<Square>();
            decode_block(shard, tiles, row_block, column_block, *square);
            if (!rotated) {
                kernels.hadamard(square->data(), BLOCK);
                transpose(*square);
                kernels.hadamard(square->data(), BLOCK);
                transpose(*square);
            }
            for (int row = 0; row < BLOCK; row++) {
                const int64_t k = row_block * BLOCK + row;
                const float left = rotated ? 1.0f : half_to_float(suh[k]);
                for (int64_t column = begin; column < end; column++) {
                    const float right = rotated ? 1.0f : half_to_float(svh[column]);
                    const float value = (*square)[size_t(row * BLOCK + column - column_block * BLOCK)];
                    store_as(dtype, out, k * stride + output + column - shard.crop_start, value * left * right);
                }
            }
        });
        trellis += shard.in_features / TILE * (shard.out_features / TILE) * 8 * shard.half_bits;
        suh += shard.in_features;
        svh += shard.out_features;
        output += shard.crop_size;
    }
}

}  // namespace exl3

// A trellis where it lies, with its scales, and products of prepared rows with blocks of its columns.
#pragma once

#include <cstdint>

#include "format.h"
#include "kernels.h"
#include "scratch.h"

namespace exl3 {

struct Weights {
    const uint32_t* tiles;
    const uint16_t* suh;
    const uint16_t* svh;
    int64_t in_features, out_features;
    int half_bits, codebook;

    int64_t row_dwords() const { return out_features / TILE * tile_dwords(half_bits); }
    const uint32_t* tile(int64_t k_tile, int64_t column_tile) const {
        return tiles + k_tile * row_dwords() + column_tile * tile_dwords(half_bits);
    }
};

// Memory for so many rows of activations as the weights take them.
inline Rows place_rows(Layout& layout, int64_t count, int64_t k, int codebook) {
    const int64_t blocks = k / (block_tiles(codebook) * TILE);
    return {layout.take<int16_t>(count * k + SPARE_ROWS * BLOCK),
            layout.take<float>(count * blocks),
            layout.take<int32_t>(count * blocks),
            layout.take<float>(count),
            layout.take<float>(count),
            count,
            k,
            blocks};
}

// Sums of all rows, of which there are few, with columns [block, block + blocks) · 128.
inline void strip_sums(const Kernels& kernels, const Weights& weights, const Rows& rows, int64_t block, int64_t blocks,
                       float* sums, int64_t sums_stride) {
    constexpr int64_t tiles = BLOCK / TILE;
    kernels.strip({weights.tile(0, block * tiles), weights.row_dwords(), weights.half_bits, weights.codebook,
                   int(blocks * tiles), rows, sums, sums_stride});
}

// Sums of rows [begin, end) with a block of columns; `panel` has room for PANEL_COLUMNS · BLOCK numbers.
inline void panel_sums(const Kernels& kernels, const Weights& weights, const Rows& rows, int64_t begin, int64_t end,
                       int64_t column_block, int16_t* panel, float* sums, int64_t sums_stride) {
    for (int64_t block = 0; block < rows.blocks; block++) {
        for (int column = 0; column < BLOCK; column += PANEL_COLUMNS) {
            const int64_t column_tile = (column_block * BLOCK + column) / TILE;
            kernels.panel({weights.tile(block * block_tiles(weights.codebook), column_tile), weights.row_dwords(),
                           weights.half_bits, weights.codebook, panel});
            kernels.multiply({panel, weights.codebook, rows, begin, end - begin, block, sums + column, sums_stride});
        }
    }
}

}  // namespace exl3

// Many rows: a panel of columns is decoded once, then multiplied by a few rows at a time.
#pragma once

#include "strip_kernels.h"

namespace {

using namespace exl3;

constexpr int PANEL_WIDTH = PANEL_VECTORS * LANES;  // columns whose pairs are interleaved

// Decodes a panel and passes each LANES columns of a k-tile to `store_rows(column, k, low, high)`: vector r of `low` holds
// the pairs of rows 2r and 2r + 1, of `high` those of rows 2r + 8 and 2r + 9.
template <int CODEBOOK, class Windows, class Store>
EXL3_INLINE inline void decode_panel(const PanelTask& t, Store&& store_rows) {
    constexpr int depth = block_tiles(CODEBOOK);
    const Windows windows = windows_of<Windows>(t.half_bits);
    const Decoder<CODEBOOK> decoder;
    const int dwords = tile_dwords(t.half_bits);
    typename Windows::Tiles tiles;
    for (int column = 0; column < PANEL_COLUMNS / TILE; column++) {
        for (int set = 0; set < SETS; set++) {
            tiles.open(t.tiles + column * dwords, t.row_dwords, depth, t.half_bits, set);
            for (int k = 0; k < depth; k++) {
                const uint32_t* tile = t.tiles + k * t.row_dwords + column * dwords;
                I low[4], high[4];
                repeat<4>([&](auto group) EXL3_INLINE {
                    const int index = 4 * set + group;
                    prefetch(tile + depth * t.row_dwords + index * dwords / (4 * SETS));
                    const auto bits = windows.load(tiles.at(k), index);
                    low[group] = decoder.template pair<0>(windows, bits);
                    high[group] = decoder.template pair<2>(windows, bits);
                });
                split_rows(low);
                split_rows(high);
                store_rows(column * TILE + set * LANES, k, low, high);
            }
        }
    }
}

template <int CODEBOOK, class Windows>
void panel_rate(const PanelTask& t) {
    constexpr int pairs = block_tiles(CODEBOOK) * TILE / 2;
    decode_panel<CODEBOOK, Windows>(t, [&](int first, int k, const I(&low)[4], const I(&high)[4]) EXL3_INLINE {
        int16_t* out = t.panel + 2 * (first / PANEL_WIDTH * pairs * PANEL_WIDTH + first % PANEL_WIDTH);
        repeat<4>([&](auto row) EXL3_INLINE {
            store(out + 2 * (k * 8 + row) * PANEL_WIDTH, low[row]);
            store(out + 2 * (k * 8 + 4 + row) * PANEL_WIDTH, high[row]);
        });
    });
}

template <int CODEBOOK>
void panel_codebook(const PanelTask& t) {
    with_windows(t.half_bits, [&](auto kind) { panel_rate<CODEBOOK, typename decltype(kind)::Type>(t); });
}

[[maybe_unused]] void panel(const PanelTask& t) {
    switch (t.codebook) {
        case INST3: return panel_codebook<INST3>(t);
        case MCG: return panel_codebook<MCG>(t);
        default: return panel_codebook<MUL1>(t);
    }
}

template <int COUNT>
void multiply_rows(const MultiplyTask& t, const int16_t* panel, int pairs, int64_t row, float* sums) {
    const int64_t first = t.block * t.rows.count + row;
    const int size = 2 * pairs;
    const int16_t* values = t.rows.values + first * size;
    I acc[COUNT][PANEL_VECTORS];
    repeat<COUNT>([&](auto r) EXL3_INLINE {
        const I start = splat(t.rows.offset[first + r]);
        repeat<PANEL_VECTORS>([&](auto v) EXL3_INLINE { acc[r][v] = start; });
    });
    for (int pair = 0; pair < pairs; pair++) {
        I w[PANEL_VECTORS];
        repeat<PANEL_VECTORS>(
            [&](auto v) EXL3_INLINE { w[v] = load(panel + 2 * (pair * PANEL_WIDTH + v * LANES)); });
        repeat<COUNT>([&](auto r) EXL3_INLINE {
            const I a = splat_pair(values + r * size + 2 * pair);
            repeat<PANEL_VECTORS>([&](auto v) EXL3_INLINE { acc[r][v] = dot(acc[r][v], w[v], a); });
        });
    }
    repeat<COUNT>([&](auto r) EXL3_INLINE {
        const float scale = t.rows.scale[first + r];
        repeat<PANEL_VECTORS>([&](auto v) EXL3_INLINE {
            add_block(sums + r * t.sums_stride + v * LANES, acc[r][v], scale, t.block == 0);
        });
    });
}

template <int COUNT>
void multiply_count(const MultiplyTask& t, const int16_t* panel, int pairs, int64_t row, int count, float* sums) {
    if (count == COUNT) return multiply_rows<COUNT>(t, panel, pairs, row, sums);
    if constexpr (COUNT > 1) multiply_count<COUNT - 1>(t, panel, pairs, row, count, sums);
}

[[maybe_unused]] void multiply_panel(const MultiplyTask& t) {
    const int pairs = opaque(block_tiles(t.codebook) * TILE / 2);
    // Rows are dealt evenly, so that no remainder runs at a single row's speed.
    const int64_t passes = (t.count + MULTIPLY_ROWS - 1) / MULTIPLY_ROWS;
    for (int part = 0; part < PANEL_COLUMNS / PANEL_WIDTH; part++) {
        const int16_t* panel = t.panel + int64_t(2) * part * pairs * PANEL_WIDTH;
        for (int64_t pass = 0; pass < passes; pass++) {
            const int64_t begin = t.count * pass / passes, end = t.count * (pass + 1) / passes;
            float* sums = t.sums + begin * t.sums_stride + part * PANEL_WIDTH;
            multiply_count<MULTIPLY_ROWS>(t, panel, pairs, t.row + begin, int(end - begin), sums);
        }
    }
}

}  // namespace

// Few rows: weights are multiplied as they are decoded, all rows of a call at once.
#pragma once

#include "format.h"
#include "kernels.h"
#include "repeat.h"

namespace {

using namespace exl3;

constexpr int GROUP_LANES = LANES / 2;
constexpr int SETS = 32 / GROUP_LANES / 4;  // of four groups, together LANES columns of a tile

inline void add_block(float* sums, I block, float scale, bool first) {
    const F value = to_float(block), by = splat_float(scale);
    store_float(sums, first ? multiply(value, by) : multiply_add(value, by, load_float(sums)));
}

template <int CODEBOOK, class Windows, int COUNT>
void strip_rows(const StripTask& t) {
    constexpr int size = block_tiles(CODEBOOK) * TILE;
    const int depth = opaque(block_tiles(CODEBOOK));
    const Windows windows(t.half_bits);
    const Decoder<CODEBOOK> decoder;
    const int dwords = tile_dwords(t.half_bits);
    typename Windows::Tiles tiles;
    for (int64_t block = 0; block < t.rows.blocks; block++) {
        for (int column = 0; column < t.column_tiles; column++) {
            const uint32_t* tile = t.tiles + block * depth * t.row_dwords + column * dwords;
            const int64_t first = block * t.rows.count;
            for (int set = 0; set < SETS; set++) {
                I sums[COUNT][4];
                repeat<COUNT * 4>([&](auto i) EXL3_INLINE { sums[i / 4][i % 4] = splat(0); });
                tiles.open(tile, t.row_dwords, depth, t.half_bits, set);
                for (int k = 0; k < depth; k++) {
                    const uint32_t* here = tile + k * t.row_dwords;
                    const int16_t* a = t.rows.values + (first * depth + k) * TILE;
                    I low[COUNT], high[COUNT];
                    repeat<COUNT>([&](auto row) EXL3_INLINE {
                        low[row] = load_rows(a + row * size);
                        high[row] = load_rows(a + row * size + 8);
                    });
                    repeat<4>([&](auto group) EXL3_INLINE {
                        const int index = 4 * set + group;
                        prefetch(here + depth * t.row_dwords + index * dwords / (4 * SETS));
                        const auto bits = windows.load(tiles.at(k), index);
                        const I w0 = decoder.template pair<0>(windows, bits);
                        const I w1 = decoder.template pair<2>(windows, bits);
                        repeat<COUNT>([&](auto row) EXL3_INLINE {
                            sums[row][group] = dot(dot(sums[row][group], w0, low[row]), w1, high[row]);
                        });
                    });
                }
                repeat<COUNT>([&](auto row) EXL3_INLINE {
                    const I total = add(add_rows(sums[row]), splat(t.rows.offset[first + row]));
                    float* out = t.sums + row * t.sums_stride + column * TILE + set * LANES;
                    add_block(out, total, t.rows.scale[first + row], block == 0);
                });
            }
        }
    }
}

template <int CODEBOOK, class Windows>
void strip_count(const StripTask& t) {
    if constexpr (STRIP_ROWS > 1) {
        if (t.rows.count == 2) return strip_rows<CODEBOOK, Windows, 2>(t);
    }
    if constexpr (STRIP_ROWS > 2) {
        if (t.rows.count == 3) return strip_rows<CODEBOOK, Windows, 3>(t);
        if (t.rows.count == 4) return strip_rows<CODEBOOK, Windows, 4>(t);
    }
    strip_rows<CODEBOOK, Windows, 1>(t);
}

template <int CODEBOOK>
void strip_rate(const StripTask& t) {
    with_windows(t.half_bits, [&](auto kind) { strip_count<CODEBOOK, typename decltype(kind)::Type>(t); });
}

void strip(const StripTask& t) {
    switch (t.codebook) {
        case INST3: return strip_rate<INST3>(t);
        case MCG: return strip_rate<MCG>(t);
        default: return strip_rate<MUL1>(t);
    }
}

}  // namespace

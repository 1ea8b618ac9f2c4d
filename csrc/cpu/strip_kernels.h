// Few rows: weights are multiplied tile by tile as they are decoded, all rows of a call at once.
//
// Up to FUSED_ROWS rows are multiplied from the registers that weights are decoded to. More rows take the weights of a
// column tile and a block of k from a buffer that stays in the first cache, a few rows at a time.
#pragma once

#include "format.h"
#include "kernels.h"
#include "repeat.h"

namespace {

using namespace exl3;

constexpr int GROUP_LANES = LANES / 2;
constexpr int SETS = 32 / GROUP_LANES / 4;  // of four groups, together LANES columns of a tile

// Windows of a rate. Their shuffles are made once: to make them takes as long as to decode some tiles.
template <class Windows>
Windows windows_of(int half_bits) {
    static const Windows made[] = {
        Windows(1), Windows(2),  Windows(3),  Windows(4),  Windows(5),  Windows(6),  Windows(7),  Windows(8),
        Windows(9), Windows(10), Windows(11), Windows(12), Windows(13), Windows(14), Windows(15), Windows(16),
    };
    return made[half_bits - 1];
}

inline void add_block(float* sums, I block, float scale, bool first) {
    const F value = to_float(block), by = splat_float(scale);
    store_float(sums, first ? multiply(value, by) : multiply_add(value, by, load_float(sums)));
}

// A block's activations of all rows of a strip, as `load_rows` spreads them over the lanes: of each k-tile two vectors.
class SpreadRows {
   public:
    void open(const Rows& rows, int64_t block, int depth) {
        const int16_t* from = rows.values + block * rows.count * depth * TILE;
        for (int64_t i = 0; i < rows.count * depth * 2; i++) store(vectors_[i], load_rows(from + i * (TILE / 2)));
    }
    // Vector HALF of a k-tile.
    I load(int row, int depth, int k, int half) const { return ::load(vectors_[(row * depth + k) * 2 + half]); }

   private:
    static constexpr int DEPTH = 8;

    alignas(64) int32_t vectors_[STRIP_ROWS * DEPTH * 2][LANES];
};

// Adds a row's products with one set of a column tile to its sums.
EXL3_INLINE inline void add_products(const StripTask& t, int64_t block, int64_t row, int column, int set, const I (&sums)[4]) {
    const int64_t at = block * t.rows.count + row;
    const I total = add(add_rows(sums), splat(t.rows.offset[at]));
    add_block(t.sums + row * t.sums_stride + column * TILE + set * LANES, total, t.rows.scale[at], block == 0);
}

// Weights of one set of a column tile in one block of k, and the rows' products with them: COUNT rows from registers.
template <int COUNT>
struct FusedRows {
    template <class Pairs>
    static EXL3_INLINE void multiply(const StripTask& t, const SpreadRows& rows, int64_t block, int column, int set,
                                     int depth, Pairs&& pairs) {
        I sums[COUNT][4];
        repeat<COUNT * 4>([&](auto i) EXL3_INLINE { sums[i / 4][i % 4] = splat(0); });
        for (int k = 0; k < depth; k++) {
            I low[COUNT], high[COUNT];
            repeat<COUNT>([&](auto row) EXL3_INLINE {
                low[row] = rows.load(row, depth, k, 0);
                high[row] = rows.load(row, depth, k, 1);
            });
            repeat<4>([&](auto group) EXL3_INLINE {
                I w0, w1;
                pairs(k, group, w0, w1);
                repeat<COUNT>([&](auto row) EXL3_INLINE {
                    sums[row][group] = dot(dot(sums[row][group], w0, low[row]), w1, high[row]);
                });
            });
        }
        repeat<COUNT>([&](auto row) EXL3_INLINE { add_products(t, block, row, column, set, sums[row]); });
    }
};

// Weights of one set of a column tile in one block of k, decoded.
struct TileBuffer {
    alignas(64) int32_t vectors[8][2][4][LANES];  // [k-tile][half][group]
};

template <int COUNT>
void multiply_tile(const StripTask& t, const SpreadRows& rows, const TileBuffer& tile, int64_t block, int64_t first,
                   int column, int set, int depth) {
    I sums[COUNT][4];
    repeat<COUNT * 4>([&](auto i) EXL3_INLINE { sums[i / 4][i % 4] = splat(0); });
    for (int i = 0; i < 2 * depth; i++) {
        I a[COUNT];
        repeat<COUNT>([&](auto row) EXL3_INLINE { a[row] = rows.load(int(first) + row, depth, i / 2, i % 2); });
        repeat<4>([&](auto group) EXL3_INLINE {
            const I w = load(tile.vectors[i / 2][i % 2][group]);
            repeat<COUNT>([&](auto row) EXL3_INLINE { sums[row][group] = dot(sums[row][group], w, a[row]); });
        });
    }
    repeat<COUNT>([&](auto row) EXL3_INLINE { add_products(t, block, first + row, column, set, sums[row]); });
}

template <int COUNT>
void multiply_tile_count(const StripTask& t, const SpreadRows& rows, const TileBuffer& tile, int64_t block,
                         int64_t first, int count, int column, int set, int depth) {
    if (count == COUNT) return multiply_tile<COUNT>(t, rows, tile, block, first, column, set, depth);
    if constexpr (COUNT > 1) multiply_tile_count<COUNT - 1>(t, rows, tile, block, first, count, column, set, depth);
}

// Any number of rows, from a buffer.
struct BufferedRows {
    template <class Pairs>
    static EXL3_INLINE void multiply(const StripTask& t, const SpreadRows& rows, int64_t block, int column, int set,
                                     int depth, Pairs&& pairs) {
        TileBuffer tile;
        for (int k = 0; k < depth; k++) {
            repeat<4>([&](auto group) EXL3_INLINE {
                I w0, w1;
                pairs(k, group, w0, w1);
                store(tile.vectors[k][0][group], w0);
                store(tile.vectors[k][1][group], w1);
            });
        }
        // Rows are dealt evenly, so that no remainder runs at a single row's speed.
        const int64_t passes = (t.rows.count + BUFFERED_ROWS - 1) / BUFFERED_ROWS;
        for (int64_t pass = 0; pass < passes; pass++) {
            const int64_t begin = t.rows.count * pass / passes, end = t.rows.count * (pass + 1) / passes;
            multiply_tile_count<BUFFERED_ROWS>(t, rows, tile, block, begin, int(end - begin), column, set, depth);
        }
    }
};

template <int CODEBOOK, class Windows, class Multiply>
void strip_rows(const StripTask& t) {
    const int depth = opaque(block_tiles(CODEBOOK));
    const Windows windows = windows_of<Windows>(t.half_bits);
    const Decoder<CODEBOOK> decoder;
    const int dwords = tile_dwords(t.half_bits);
    typename Windows::Tiles tiles;
    SpreadRows rows;
    for (int64_t block = 0; block < t.rows.blocks; block++) {
        rows.open(t.rows, block, depth);
        for (int column = 0; column < t.column_tiles; column++) {
            const uint32_t* tile = t.tiles + block * depth * t.row_dwords + column * dwords;
            for (int set = 0; set < SETS; set++) {
                tiles.open(tile, t.row_dwords, depth, t.half_bits, set);
                Multiply::multiply(t, rows, block, column, set, depth, [&](int k, auto group, I& w0, I& w1) EXL3_INLINE {
                    const int index = 4 * set + group;
                    prefetch(tile + (k + depth) * t.row_dwords + index * dwords / (4 * SETS));
                    const auto bits = windows.load(tiles.at(k), index);
                    w0 = decoder.template pair<0>(windows, bits);
                    w1 = decoder.template pair<2>(windows, bits);
                });
            }
        }
    }
}

template <int CODEBOOK, class Windows, int COUNT>
void strip_count(const StripTask& t) {
    if (t.rows.count == COUNT) return strip_rows<CODEBOOK, Windows, FusedRows<COUNT>>(t);
    if constexpr (COUNT > 1) strip_count<CODEBOOK, Windows, COUNT - 1>(t);
}

template <int CODEBOOK>
void strip_rate(const StripTask& t) {
    with_windows(t.half_bits, [&](auto kind) {
        using Windows = typename decltype(kind)::Type;
        if constexpr (STRIP_ROWS > FUSED_ROWS) {
            if (t.rows.count > FUSED_ROWS) return strip_rows<CODEBOOK, Windows, BufferedRows>(t);
        }
        strip_count<CODEBOOK, Windows, FUSED_ROWS>(t);
    });
}

void strip(const StripTask& t) {
    switch (t.codebook) {
        case INST3: return strip_rate<INST3>(t);
        case MCG: return strip_rate<MCG>(t);
        default: return strip_rate<MUL1>(t);
    }
}

}  // namespace

// Many rows with AMX: 16-bit weights and activations as two planes of bytes each, four exact products of int8.
//
// A quad is four bytes along k that a lane of a tile multiplies and adds: of each 16 rows of weights, rows 2r, 2r + 8,
// 2r + 1 and 2r + 9 in this order.
#pragma once

#include "amx.h"
#include "panel_kernels.h"

namespace {

using namespace exl3;

constexpr int AMX_STEP = AMX_BYTES;  // k that a tile covers

// Rewrites a row's values as [block][plane][k], upper bytes first: value = 256 · upper + lower, both signed.
void arrange_bytes(const Rows& rows, int64_t row) {
    const int64_t size = rows.k / rows.blocks;
    uint8_t upper_from[64], lower_from[64];
    for (int i = 0; i < 64; i++) {
        const int at = i / 16 * TILE + 2 * (i / 4 % 4) + i / 2 % 2 + i % 2 * 8;
        lower_from[i] = uint8_t(2 * at);
        upper_from[i] = uint8_t(2 * at + 1);
    }
    const I upper = load(upper_from), lower = load(lower_from), rounding = _mm512_set1_epi16(128);
    for (int64_t block = 0; block < rows.blocks; block++) {
        int16_t* values = rows.values + (block * rows.count + row) * size;
        I planes[2][BLOCK / AMX_STEP];
        for (int step = 0; step < size / AMX_STEP; step++) {
            const I a = load(values + step * AMX_STEP), b = load(values + step * AMX_STEP + 32);
            planes[0][step] = _mm512_permutex2var_epi8(add_words(a, rounding), upper, add_words(b, rounding));
            planes[1][step] = _mm512_permutex2var_epi8(a, lower, b);
        }
        for (int plane = 0; plane < 2; plane++) {
            for (int step = 0; step < size / AMX_STEP; step++) {
                store(reinterpret_cast<uint8_t*>(values) + plane * size + step * AMX_STEP, planes[plane][step]);
            }
        }
    }
}

// Decodes a panel to [columns / 16][step][plane] tiles, upper bytes (signed) first, then lower ones (unsigned).
template <int CODEBOOK, class Windows>
void panel_planes_rate(const PanelTask& t) {
    static_assert(LANES == AMX_ROWS && SETS == 1, "a row of a tile is a vector");
    constexpr int steps = block_tiles(CODEBOOK) * TILE / AMX_STEP;
    constexpr __mmask64 odd_bytes = 0xaaaaaaaaaaaaaaaa;
    uint8_t* bytes = reinterpret_cast<uint8_t*>(t.panel);
    decode_panel<CODEBOOK, Windows>(t, [&](int first, int k, const I(&low)[4], const I(&high)[4]) EXL3_INLINE {
        uint8_t* out = bytes + (first / TILE * steps + k / 4) * 2 * AMX_TILE + k % 4 * 4 * AMX_BYTES;
        repeat<4>([&](auto row) EXL3_INLINE {
            const I upper = _mm512_mask_blend_epi8(odd_bytes, _mm512_srli_epi16(low[row], 8), high[row]);
            const I lower = _mm512_mask_blend_epi8(odd_bytes, low[row], _mm512_slli_epi16(high[row], 8));
            store(out + row * AMX_BYTES, upper);
            store(out + AMX_TILE + row * AMX_BYTES, lower);
        });
    });
}

template <int CODEBOOK>
void panel_planes_codebook(const PanelTask& t) {
    with_windows(t.half_bits, [&](auto kind) { panel_planes_rate<CODEBOOK, typename decltype(kind)::Type>(t); });
}

void panel_planes(const PanelTask& t) {
    switch (t.codebook) {
        case INST3: return panel_planes_codebook<INST3>(t);
        case MCG: return panel_planes_codebook<MCG>(t);
        default: return panel_planes_codebook<MUL1>(t);
    }
}

// The products of 16 rows and 16 columns by weight of their bytes: both upper, one of each, both lower.
struct Products {
    alignas(64) int32_t upper[AMX_ROWS * 16], mixed[AMX_ROWS * 16], lower[AMX_ROWS * 16];
};

// Adds the products of a row and 16 columns to its sums.
inline void add_products(const Products& products, int64_t row, int32_t offset, float scale, float* sums, bool first) {
    const I upper = _mm512_slli_epi32(load(products.upper + row * 16), 16);
    const I mixed = _mm512_slli_epi32(load(products.mixed + row * 16), 8);
    const I lower = add(load(products.lower + row * 16), splat(offset));
    add_block(sums, add(add(upper, mixed), lower), scale, first);
}

// Turns between multiplying and adding. What tiles write can be read without delay only once it is in the cache.
constexpr int LAG = 2;

// Multiplies the panel by all rows: in each turn, a column tile by 16 rows, of which only `most` where there are fewer.
//
// The products of an earlier turn are added to the sums between the multiplications of this one: whatever waits for tiles
// would otherwise leave the processor's queues no room for work that does not.
template <int STEPS>
void multiply_planes(const MultiplyTask& t) {
    constexpr int size = STEPS * AMX_STEP, stride = 2 * size, columns = PANEL_COLUMNS / TILE;
    const int64_t passes = (t.count + AMX_ROWS - 1) / AMX_ROWS, most = (t.count + passes - 1) / passes;
    const TileShapes shapes(7, int(most));  // 0 to 2 are sums, 3 to 6 activations, 7 weights
    const uint8_t* panel = reinterpret_cast<const uint8_t*>(t.panel);
    const int64_t first_row = t.block * t.rows.count + t.row, turns = passes * columns;
    Products ring[LAG + 1];
    for (int64_t turn = 0; turn < turns + LAG; turn++) {
        const int64_t added = turn < LAG ? 0 : turn - LAG, begin = added / columns * most;
        const int64_t count = turn < LAG ? 0 : t.count - begin < most ? t.count - begin : most;
        const Products& old = ring[added % (LAG + 1)];
        const int32_t* offset = t.rows.offset + first_row + begin;
        const float* scale = t.rows.scale + first_row + begin;
        float* sums = t.sums + begin * t.sums_stride + added % columns * TILE;
        const auto add_part = [&](int64_t first, int64_t last) EXL3_INLINE {
            for (int64_t row = first; row < last && row < count; row++) {
                add_products(old, row, offset[row], scale[row], sums + row * t.sums_stride, t.block == 0);
            }
        };
        if (turn >= turns) {
            add_part(0, AMX_ROWS);
            continue;
        }
        if (turn % columns == 0) {
            // The last pass may multiply rows behind its own; the caller has memory there, and nothing adds them.
            const int16_t* rows = t.rows.values + (first_row + turn / columns * most) * size;
            const uint8_t* values = reinterpret_cast<const uint8_t*>(rows);
            repeat<STEPS>([&](auto step) EXL3_INLINE {
                tile_load<3 + 2 * step>(values + step * AMX_STEP, stride);
                tile_load<4 + 2 * step>(values + size + step * AMX_STEP, stride);
            });
        }
        tile_zero<0>();
        tile_zero<1>();
        tile_zero<2>();
        const uint8_t* weights = panel + turn % columns * STEPS * 2 * AMX_TILE;
        constexpr int part = AMX_ROWS / (2 * STEPS);
        repeat<STEPS>([&](auto step) EXL3_INLINE {
            tile_load<7>(weights + step * 2 * AMX_TILE, AMX_BYTES);
            tile_bss<0, 3 + 2 * step, 7>();
            tile_bss<1, 4 + 2 * step, 7>();
            add_part(2 * step * part, (2 * step + 1) * part);
            tile_load<7>(weights + step * 2 * AMX_TILE + AMX_TILE, AMX_BYTES);
            tile_bsu<1, 3 + 2 * step, 7>();
            tile_bsu<2, 4 + 2 * step, 7>();
            add_part((2 * step + 1) * part, (2 * step + 2) * part);
        });
        Products& products = ring[turn % (LAG + 1)];
        tile_store<0>(products.upper);
        tile_store<1>(products.mixed);
        tile_store<2>(products.lower);
    }
}

void multiply_panel_planes(const MultiplyTask& t) {
    block_tiles(t.codebook) == 8 ? multiply_planes<2>(t) : multiply_planes<1>(t);
}

}  // namespace

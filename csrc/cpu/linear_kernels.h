// The inner loops of a linear, written once over the vector type of the including file.
//
// That file supplies, for vectors of LANES dwords: I and F, their arithmetic, the 4 x 4 exchanges
// between lanes, and how much its registers hold (STRIP_ROWS, MULTIPLY_ROWS rows, PANEL_VECTORS
// vectors of columns); classes of windows (the 16-bit states of a tile), of which `with_windows`
// picks one by rate; and Decoder<codebook> (two vectors of states to int16 weight pairs). A "group" is LANES / 2 lanes of a tile; the dwords 2i and 2i + 1 of
// its vectors belong to lane i: position j (column c) and j + 4 (column c + 8). For a fixed j the
// row depends on i % 4 only, so one activation vector serves every group of every tile.
#pragma once

#include "format.h"
#include "kernels.h"
#include "repeat.h"

namespace {

using namespace exl3;

constexpr int GROUP_LANES = LANES / 2;
constexpr int SETS = 32 / GROUP_LANES / 4;  // of four groups, together LANES columns of a tile

// ---- activations -------------------------------------------------------------------------------

// What an integer weight stands for: w ≈ unit · (integer + offset + rest), to 2.3e-4 of the weights'
// root mean square. The rest is the mean over all 65,536 states: an error that all weights share
// would not average out, but gather in the first channel of each rotated block.
template <int CODEBOOK>
struct Units {
    static constexpr float unit = 0x1p-12f;
    static constexpr int offset = 0;
    static constexpr double rest = CODEBOOK == MCG ? -0.1279754638671875 : -0.0612945556640625;
    // |w| < 3.98, so block sums stay below 2^31 while Σ|values| does not exceed this.
    static constexpr float sum_limit = 130900.0f;
};

template <>
struct Units<MUL1> {
    static constexpr float unit = MUL1_SCALE;
    static constexpr int offset = -510;
    static constexpr double rest = -0.26782474281285296;
    static constexpr float sum_limit = 0x1p30f;  // 510 · 32767 · 128 < 2^31: never reached
};

constexpr int BLOCK_VECTORS = BLOCK / LANES;
using BlockVectors = F[BLOCK_VECTORS];

// The unscaled Hadamard transform of 128 values.
EXL3_INLINE inline void rotate(BlockVectors& v) {
    repeat<BLOCK_VECTORS>([&](auto i) EXL3_INLINE { v[i] = hadamard_vector(v[i]); });
    const auto stage = [&](auto stride) EXL3_INLINE {
        repeat<BLOCK_VECTORS>([&](auto i) EXL3_INLINE {
            if constexpr ((i & stride) == 0) {
                const F a = v[i], b = v[i + stride];
                v[i] = add(a, b);
                v[i + stride] = subtract(a, b);
            }
        });
    };
    stage(std::integral_constant<int, 1>{});
    stage(std::integral_constant<int, 2>{});
    stage(std::integral_constant<int, 4>{});
    if constexpr (BLOCK_VECTORS > 8) stage(std::integral_constant<int, 8>{});
}

void hadamard(float* values, int64_t blocks) {
    for (int64_t block = 0; block < blocks; block++) {
        float* at = values + block * BLOCK;
        BlockVectors v;
        repeat<BLOCK_VECTORS>([&](auto i) EXL3_INLINE { v[i] = load_float(at + i * LANES); });
        rotate(v);
        const F scale = splat_float(0.08838834764831845f);
        repeat<BLOCK_VECTORS>([&](auto i) EXL3_INLINE { store_float(at + i * LANES, multiply(v[i], scale)); });
    }
}

template <int DTYPE>
EXL3_INLINE inline F load_as(const void* values, int64_t i) {
    if (DTYPE == FLOAT32) return load_float(static_cast<const float*>(values) + i);
    if (DTYPE == FLOAT16) return load_half(static_cast<const uint16_t*>(values) + i);
    return load_bfloat(static_cast<const uint16_t*>(values) + i);
}

template <int DTYPE>
float load_one(const void* values, int64_t i) {
    if (DTYPE == FLOAT32) return static_cast<const float*>(values)[i];
    const uint16_t bits = static_cast<const uint16_t*>(values)[i];
    return DTYPE == FLOAT16 ? half_to_float(bits) : bfloat_to_float(bits);
}

// The bits of the largest magnitude, which order like the magnitudes, with NaN above infinity.
template <int DTYPE>
uint32_t largest_magnitude(const void* x, int64_t in) {
    I largest = splat(0);
    int64_t i = 0;
    for (; i + LANES <= in; i += LANES) largest = maximum(largest, magnitude_bits(load_as<DTYPE>(x, i)));
    uint32_t result = uint32_t(largest_lane(largest));
    for (; i < in; i++) {
        const uint32_t magnitude = float_bits(load_one<DTYPE>(x, i)) & 0x7fffffff;
        result = magnitude > result ? magnitude : result;
    }
    return result;
}

// Columns [k, k + 128) of x, zero from `in` on.
template <int DTYPE>
EXL3_INLINE inline void load_block(const void* x, int64_t in, int64_t k, BlockVectors& v) {
    if (k + BLOCK <= in) {
        repeat<BLOCK_VECTORS>([&](auto i) EXL3_INLINE { v[i] = load_as<DTYPE>(x, k + i * LANES); });
        return;
    }
    float values[BLOCK] = {};
    for (int64_t i = k; i < in; i++) values[i - k] = load_one<DTYPE>(x, i);
    repeat<BLOCK_VECTORS>([&](auto i) EXL3_INLINE { v[i] = load_float(values + i * LANES); });
}

// Quantises the vectors [first, first + those of one quantisation block) of v as block `at` of rows;
// returns scale · Σ values.
template <int CODEBOOK, int FIRST>
EXL3_INLINE inline double quantise(const BlockVectors& v, const Rows& rows, int64_t at) {
    constexpr int size = block_tiles(CODEBOOK) * TILE;
    F largest = splat_float(0), total = splat_float(0);
    repeat<size / LANES>([&](auto i) EXL3_INLINE {
        const F magnitude = absolute(v[FIRST + i]);
        largest = maximum(largest, magnitude);
        total = add(total, magnitude);
    });
    float peak = largest_lane(largest), norm = sum_lanes(total);
    // Below this the block is lost against its row, whose largest input was scaled to [1, 2).
    if (peak < 1e-30f) peak = norm = 1e-30f;
    const float by_peak = 32767.0f / peak, by_norm = Units<CODEBOOK>::sum_limit / norm;
    const float inverse = by_peak < by_norm ? by_peak : by_norm;
    I sum = splat(0);
    repeat<size / LANES>([&](auto i) EXL3_INLINE {
        const I value = round_to_int(multiply(v[FIRST + i], splat_float(inverse)));
        store_int16(rows.values + at * size + i * LANES, value);
        sum = add(sum, value);
    });
    const int32_t all = sum_lanes(sum);
    rows.scale[at] = 1.0f / inverse;
    rows.offset[at] = Units<CODEBOOK>::offset * all;
    return double(rows.scale[at]) * all;
}

template <int CODEBOOK, int DTYPE>
void prepare_row(const PrepareTask& t) {
    const Rows& rows = t.rows;
    const uint32_t peak = largest_magnitude<DTYPE>(t.x, t.in);
    const bool finite = peak < 0x7f800000;
    // Scaling by a power of two keeps every later product away from overflow and underflow.
    int exponent = int(peak >> 23) - 127;
    exponent = !finite ? 0 : exponent < -126 ? -126 : exponent > 126 ? 126 : exponent;
    const F shrink = splat_float(bits_float(uint32_t(127 - exponent) << 23));
    double sum = 0;
    constexpr int blocks = BLOCK / (block_tiles(CODEBOOK) * TILE);
    for (int64_t k = 0; k < rows.k; k += BLOCK) {
        BlockVectors v;
        // A row with a NaN or an infinity is read as zeros and poisoned below.
        load_block<DTYPE>(t.x, finite ? t.in : 0, k, v);
        repeat<BLOCK_VECTORS>([&](auto i) EXL3_INLINE {
            v[i] = multiply(multiply(v[i], shrink), load_half(t.suh + k + i * LANES));
        });
        rotate(v);
        repeat<blocks>([&](auto i) EXL3_INLINE {
            const int64_t at = (k / BLOCK * blocks + i) * rows.count + t.row;
            sum += quantise<CODEBOOK, i * BLOCK_VECTORS / blocks>(v, rows, at);
        });
    }
    rows.constant[t.row] = finite ? float(Units<CODEBOOK>::rest * sum) : bits_float(0x7fc00000);
    // 1/128 is the scale of the two rotations together.
    rows.gain[t.row] = Units<CODEBOOK>::unit / BLOCK * bits_float(uint32_t(127 + exponent) << 23);
}

template <int CODEBOOK>
void prepare_dtype(const PrepareTask& t) {
    switch (t.dtype) {
        case FLOAT32: return prepare_row<CODEBOOK, FLOAT32>(t);
        case FLOAT16: return prepare_row<CODEBOOK, FLOAT16>(t);
        default: return prepare_row<CODEBOOK, BFLOAT16>(t);
    }
}

void prepare(const PrepareTask& t) {
    switch (t.codebook) {
        case INST3: return prepare_dtype<INST3>(t);
        case MCG: return prepare_dtype<MCG>(t);
        default: return prepare_dtype<MUL1>(t);
    }
}

// ---- few rows: decode and multiply at once -----------------------------------------------------

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
    for (int64_t block = 0; block < t.rows.blocks; block++) {
        for (int column = 0; column < t.column_tiles; column++) {
            const uint32_t* tile = t.tiles + block * depth * t.row_dwords + column * dwords;
            const int64_t first = block * t.rows.count;
            for (int set = 0; set < SETS; set++) {
                I sums[COUNT][4];
                repeat<COUNT * 4>([&](auto i) EXL3_INLINE { sums[i / 4][i % 4] = splat(0); });
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
                        const auto bits = windows.load(here, index);
                        const I w0 = decoder.pair(windows.template get<0>(bits), windows.template get<1>(bits));
                        const I w1 = decoder.pair(windows.template get<2>(bits), windows.template get<3>(bits));
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

// ---- many rows: decode a panel once, then multiply ---------------------------------------------

constexpr int PANEL_WIDTH = PANEL_VECTORS * LANES;  // columns whose pairs are interleaved

template <int CODEBOOK, class Windows>
void panel_rate(const PanelTask& t) {
    constexpr int depth = block_tiles(CODEBOOK), pairs = depth * TILE / 2;
    const Windows windows(t.half_bits);
    const Decoder<CODEBOOK> decoder;
    const int dwords = tile_dwords(t.half_bits);
    for (int k = 0; k < depth; k++) {
        for (int column = 0; column < PANEL_COLUMNS / TILE; column++) {
            const uint32_t* tile = t.tiles + k * t.row_dwords + column * dwords;
            for (int set = 0; set < SETS; set++) {
                I low[4], high[4];
                repeat<4>([&](auto group) EXL3_INLINE {
                    const int index = 4 * set + group;
                    prefetch(tile + depth * t.row_dwords + index * dwords / (4 * SETS));
                    const auto bits = windows.load(tile, index);
                    low[group] = decoder.pair(windows.template get<0>(bits), windows.template get<1>(bits));
                    high[group] = decoder.pair(windows.template get<2>(bits), windows.template get<3>(bits));
                });
                split_rows(low);
                split_rows(high);
                const int first = column * TILE + set * LANES;
                int16_t* out = t.panel + 2 * (first / PANEL_WIDTH * pairs * PANEL_WIDTH + first % PANEL_WIDTH);
                repeat<4>([&](auto row) EXL3_INLINE {
                    store(out + 2 * (k * 8 + row) * PANEL_WIDTH, low[row]);
                    store(out + 2 * (k * 8 + 4 + row) * PANEL_WIDTH, high[row]);
                });
            }
        }
    }
}

template <int CODEBOOK>
void panel_codebook(const PanelTask& t) {
    with_windows(t.half_bits, [&](auto kind) { panel_rate<CODEBOOK, typename decltype(kind)::Type>(t); });
}

void panel(const PanelTask& t) {
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

void multiply_panel(const MultiplyTask& t) {
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

// ---- outputs -----------------------------------------------------------------------------------

template <int DTYPE>
void store_block(const float* values, int size, void* y) {
    if (DTYPE == FLOAT32) {
        std::memcpy(y, values, size_t(size) * sizeof(float));
        return;
    }
    uint16_t out[BLOCK];
    for (int i = 0; i < BLOCK; i += LANES) {
        const F v = load_float(values + i);
        DTYPE == FLOAT16 ? store_half(out + i, v) : store_bfloat(out + i, v);
    }
    std::memcpy(y, out, size_t(size) * sizeof(uint16_t));
}

void finish(const FinishTask& t) {
    float values[BLOCK], out[BLOCK] = {};
    BlockVectors v;
    repeat<BLOCK_VECTORS>(
        [&](auto i) EXL3_INLINE { v[i] = add(load_float(t.sums + i * LANES), splat_float(t.constant)); });
    // The transform commutes with the tile order, which only permutes the bits of the index.
    rotate(v);
    repeat<BLOCK_VECTORS>(
        [&](auto i) EXL3_INLINE { store_float(values + i * LANES, multiply(v[i], splat_float(t.gain))); });
    for (int tile = 0; tile < BLOCK; tile += TILE) {
        for (int i = 0; i < TILE; i++) out[tile + column_of_sum(i)] = values[tile + i];
    }
    repeat<BLOCK_VECTORS>([&](auto i) EXL3_INLINE {
        store_float(values + i * LANES, multiply(load_float(out + i * LANES), load_half(t.svh + i * LANES)));
    });
    // Whole vectors are stored below, so the returned columns move to the front of a full block.
    std::memcpy(out, values + t.first, size_t(t.size) * sizeof(float));
    for (int i = 0; t.bias && i < t.size; i++) {
        out[i] += t.bias_dtype == FLOAT32   ? load_one<FLOAT32>(t.bias, i)
                  : t.bias_dtype == FLOAT16 ? load_one<FLOAT16>(t.bias, i)
                                            : load_one<BFLOAT16>(t.bias, i);
    }
    switch (t.dtype) {
        case FLOAT32: return store_block<FLOAT32>(out, t.size, t.y);
        case FLOAT16: return store_block<FLOAT16>(out, t.size, t.y);
        default: return store_block<BFLOAT16>(out, t.size, t.y);
    }
}

}  // namespace

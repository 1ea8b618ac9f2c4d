// What one instruction set provides: the inner loops of a linear and of the encoder, as a table of
// functions. The drivers (linear.cpp, encode.cpp) cut the work and are compiled once, for any CPU.
//
// Arithmetic of a linear. A row of activations, scaled and rotated, is cut into blocks along k;
// each is quantised to int16 with its own float scale. Weights are decoded to small integers and
// multiplied in exact int32 arithmetic within a block; blocks are summed in float in ascending k.
// Scales are chosen so that no block sum can leave int32, whatever the weights.
#pragma once

#include <cstdint>

#include "abi.h"

namespace exl3 {

enum Dtype : int { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

constexpr int PANEL_COLUMNS = 64;  // columns that `panel` decodes and `multiply` consumes
constexpr int SPARE_ROWS = 15;     // rows of values behind the last that `multiply` may read

// k-tiles of a quantisation block. mul1's weights have 10 bits, which leaves room for 16-bit
// activations over 128 channels; the others need 15 bits, hence shorter sums.
constexpr int block_tiles(int codebook) { return codebook == 2 ? 8 : 4; }

// Quantised rows of activations in the rotated basis of one shard. A block of all rows is contiguous,
// as the many-row path reads it.
struct Rows {
    int16_t* values;  // [blocks][count][k of a block]
    float* scale;     // [blocks][count]
    int32_t* offset;  // [blocks][count], where every sum of the block starts (mul1: -510 · Σ values)
    float* constant;  // [count], added to every column before the output rotation; NaN poisons the row
    float* gain;      // [count], by which every output of the row is multiplied
    int64_t count;
    int64_t k;  // a multiple of 128
    int64_t blocks;
};

struct PrepareTask {
    const void* x;  // [in]
    int dtype;
    int64_t in;           // columns of x; k beyond them is zero
    const uint16_t* suh;  // fp16 [k]
    int codebook;
    Rows rows;
    int64_t row;  // row of `rows` to fill
};

// Sums over all k for a strip of columns and a few rows, decoding on the way.
struct StripTask {
    const uint32_t* tiles;  // k-tile 0 of the strip's first column tile
    int64_t row_dwords;     // from one k-tile to the next
    int half_bits;
    int codebook;
    int column_tiles;
    Rows rows;    // all of them, at most strip_rows
    float* sums;  // [rows.count][sums_stride], in tile order (see column_of_sum)
    int64_t sums_stride;
};

// Decodes one k-block of PANEL_COLUMNS columns for `multiply`: to int16 pairs along k, [pairs][columns], or as the set likes,
// in as many bytes.
struct PanelTask {
    const uint32_t* tiles;
    int64_t row_dwords;
    int half_bits;
    int codebook;
    int16_t* panel;
};

// Adds the products of rows with a panel to their sums.
struct MultiplyTask {
    const int16_t* panel;
    int codebook;
    Rows rows;
    int64_t row;
    int64_t count;
    int64_t block;  // of k
    float* sums;    // [count][sums_stride]
    int64_t sums_stride;
};

// Turns a 128-column block of a row's sums into outputs: rotation, svh, bias, cast.
struct FinishTask {
    const float* sums;  // [128]
    float constant;
    float gain;
    const uint16_t* svh;  // fp16 [128]
    const void* bias;     // of the first column returned, or null
    int bias_dtype;
    void* y;  // where that column goes
    int dtype;
    int first, size;  // columns of the block that are returned
};

// Applies an activation (activation.h) to a part of a row.
struct ActivateTask {
    int kind;
    float alpha, beta, limit;
    const float* gate;  // not read where the activation has none
    const float* up;
    float* out;
    int count;  // at most 128
};

// Adds rows, each times its weight, in their order, and casts the sum.
struct CombineTask {
    const float* values;      // [rows][stride]
    int64_t stride;
    const int32_t* places;    // [terms], the row of each term; negative for none
    const float* weights;     // [terms], or null for ones
    int64_t terms;
    int64_t first, count;     // columns
    void* out;                // of the first column
    int dtype;
};

constexpr int ENCODE_TILES = 2;   // tiles that `viterbi` advances together, sharing its reads of the codebook
constexpr int ENCODE_GROUP = 32;  // edges whose candidates lie together in the codebook's order

// One step of the encoder's search. Edges are the state's bits that the next state keeps; costs are
// squared errors in the encoder's units, relative to an arbitrary start, and never wrap: either they
// stop at 65535, or differences are clamped so that they stay below.
struct ViterbiTask {
    // [edges / ENCODE_GROUP][entries][ENCODE_GROUP]: the value of state entry · edges + edge, the
    // edges of a group in the order of `edge_of_lane`.
    const int16_t* values;
    int edges;     // edges that leave: 2^(16 - the next position's new bits)
    int entries;   // states that lead to one of them
    int in_shift;  // new bits of this position: state >> in_shift is the edge it came from
    int16_t clamp;  // differences beyond it cost no more; 0: squares of all fit 16 bits, sums saturate
    int16_t target[ENCODE_TILES];
    const uint16_t* from[ENCODE_TILES];  // costs of the edges that arrive
    uint16_t* to[ENCODE_TILES];          // costs of the edges that leave
    uint16_t least[ENCODE_TILES];        // out: the least of them
};

// Edge within its group of the i-th lane. Lanes that came from the same edge are spread, so that a
// broadcast of the group's arriving costs, as they lie in memory, meets the right lanes.
constexpr int edge_of_lane(int in_shift, int i) {
    const int arriving = in_shift < 5 ? 32 >> in_shift : 1;
    return in_shift < 5 ? i % arriving << in_shift | i / arriving : i;
}

// Column within its tile of the i-th of 16 sums: tiles hold columns c and c + 8 side by side.
constexpr int column_of_sum(int i) { return i / 2 + 8 * (i % 2); }

struct Kernels {
    const char* name;
    int strip_rows;  // rows that `strip` takes at most
    void (*prepare)(const PrepareTask&);
    // Brings a prepared row of many into the order that `multiply` takes, in place; null where there is nothing to do.
    void (*arrange)(const Rows&, int64_t row);
    void (*strip)(const StripTask&);
    void (*panel)(const PanelTask&);
    void (*multiply)(const MultiplyTask&);
    void (*finish)(const FinishTask&);
    void (*activate)(const ActivateTask&);
    void (*combine)(const CombineTask&);
    // In place, over each 128 consecutive floats, scaled by 1/sqrt(128).
    void (*hadamard)(float* values, int64_t blocks);
    void (*viterbi)(ViterbiTask&);
    void (*gather_row)(const exl3_row_call&, int64_t row);  // of a quantized embedding or n-gram table
};

extern const Kernels kernels_scalar;
#if defined(__x86_64__) || defined(_M_X64)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx2_vnni;
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx512_vnni;
extern const Kernels kernels_avx512_vbmi;
extern const Kernels kernels_avx512_words;
extern const Kernels kernels_avx512_fp16;
extern const Kernels kernels_amx;
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
#endif

}  // namespace exl3

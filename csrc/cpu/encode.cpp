#include "encode.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "decode.h"
#include "format.h"
#include "parallel.h"

namespace exl3 {
namespace {

constexpr int STATES = 65536;

// Positions before and after the ring's start that the first pass searches to choose the edge there.
// 16 on each side leave 1.7 % more squared error than a whole ring, 32 leave 1.1 % (mul1, K = 4).
constexpr int MARGIN = 24;

constexpr int64_t PIECE = 16;  // tiles of a unit of work

// A codebook in the search's units, in the order in which `viterbi` reads it, and the search's bounds.
struct SearchTable {
    float scale;               // units per 1.0
    float least, most;         // of the codebook's values: targets beyond are as far from all of them
    int16_t clamp;             // see ViterbiTask
    uint16_t elsewhere;        // cost of starting at another edge than the one wanted
    std::vector<int16_t> values[2];  // for even and odd positions

    const std::vector<int16_t>& at(int position) const { return values[position % 2]; }
    int square(int difference) const {
        if (clamp) difference = std::clamp<int>(difference, -clamp, clamp);
        return difference * difference;
    }
};

// Chooses the units. With 8-bit differences the squares of all fit 16 bits; from K = 5 on, that is
// too coarse against the error that is left, and larger differences are clamped instead.
void choose_units(int half_bits, double root_mean_square, SearchTable& table) {
    table.clamp = 0;
    table.elsewhere = 65535;
    table.scale = 255 / (table.most - table.least);
    if (half_bits < 10) return;
    // Any edge is reached from any other within `steps` positions, so two costs of one position differ
    // by at most steps · clamp². Paths from elsewhere pay more than that, and may grow by as much before
    // a path from the wanted edge joins them. All that, and two steps before costs are lowered, fits.
    const int steps = (32 + half_bits - 1) / half_bits;
    table.clamp = int16_t(std::sqrt(65535.0 / (2 * steps + 2)));
    table.elsewhere = uint16_t(steps * table.clamp * table.clamp + 1);
    // Measured: less makes the sparse values of the tails indistinct, more the dense ones of the middle.
    const double reach = root_mean_square * 0.7 * std::exp2((5 - 0.5 * half_bits) / 3);
    table.scale = float(table.clamp / reach);
}

int in_bits(int half_bits, int position) { return window_step(half_bits, position % 2); }
int out_edges(int half_bits, int position) { return 1 << (16 - in_bits(half_bits, position + 1)); }

// Where the first state that leads to an edge is in the table; the next ones follow ENCODE_GROUP apart.
int table_index(int in_shift, int edges, int edge) {
    const int place = edge % ENCODE_GROUP;
    // The inverse of edge_of_lane.
    const int lane = in_shift < 5 ? (place >> in_shift) + (place & ((1 << in_shift) - 1)) * (32 >> in_shift) : place;
    return edge / ENCODE_GROUP * (STATES / edges) * ENCODE_GROUP + lane;
}

SearchTable make_table(int half_bits, int codebook) {
    const uint16_t* weights = codebook_table(codebook);
    std::vector<float> values(STATES);
    double square = 0;
    for (int state = 0; state < STATES; state++) {
        values[size_t(state)] = half_to_float(weights[state]);
        square += double(values[size_t(state)]) * double(values[size_t(state)]);
    }
    SearchTable table;
    table.least = *std::min_element(values.begin(), values.end());
    table.most = *std::max_element(values.begin(), values.end());
    choose_units(half_bits, std::sqrt(square / STATES), table);
    for (int parity = 0; parity < 2; parity++) {
        const int in_shift = in_bits(half_bits, parity), edges = out_edges(half_bits, parity);
        table.values[parity].resize(STATES);
        for (int state = 0; state < STATES; state++) {
            const int index = table_index(in_shift, edges, state % edges) + state / edges * ENCODE_GROUP;
            table.values[parity][size_t(index)] = int16_t(std::round(values[size_t(state)] * table.scale));
        }
    }
    return table;
}

const SearchTable& search_table(int half_bits, int codebook) {
    static std::mutex mutex;
    static std::map<std::pair<int, int>, std::unique_ptr<SearchTable>> tables;
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<SearchTable>& table = tables[{half_bits, codebook}];
    if (!table) table = std::make_unique<SearchTable>(make_table(half_bits, codebook));
    return *table;
}

using Targets = std::array<int16_t, TILE_WEIGHTS>;
using States = std::array<uint16_t, TILE_WEIGHTS>;

// Searches the rings of ENCODE_TILES tiles side by side.
class Search {
   public:
    Search(const Kernels& kernels, int half_bits, const SearchTable& table)
        : kernels_(kernels), half_bits_(half_bits), table_(table), stride_(1 << (16 - half_bits / 2)) {
        for (auto& tile : costs_) tile.resize(size_t(TILE_WEIGHTS + 1) * size_t(stride_));
    }

    void run(const Targets (&targets)[ENCODE_TILES], States (&states)[ENCODE_TILES]) {
        // First pass: around the ring's start, from any edge to any edge.
        for (auto& tile : costs_) std::fill_n(tile.begin(), stride_, uint16_t(0));
        forward(targets, -MARGIN, 2 * MARGIN);
        int start[ENCODE_TILES];
        for (int tile = 0; tile < ENCODE_TILES; tile++) {
            const uint16_t* last = cost(tile, 2 * MARGIN);
            int edge = int(std::min_element(last, last + out_edges(half_bits_, MARGIN - 1)) - last);
            for (int step = 2 * MARGIN - 1; step >= MARGIN; step--) {
                edge = winner(targets[tile], tile, -MARGIN, step, edge) >> in_bits(half_bits_, step - MARGIN);
            }
            start[tile] = edge;
        }
        // Second pass: the whole ring, from that edge back to it.
        for (int tile = 0; tile < ENCODE_TILES; tile++) {
            std::fill_n(costs_[tile].begin(), stride_, table_.elsewhere);
            costs_[tile][size_t(start[tile])] = 0;
        }
        forward(targets, 0, TILE_WEIGHTS);
        for (int tile = 0; tile < ENCODE_TILES; tile++) {
            int edge = start[tile];
            for (int t = TILE_WEIGHTS - 1; t >= 0; t--) {
                const int state = winner(targets[tile], tile, 0, t, edge);
                states[tile][size_t(t)] = uint16_t(state);
                edge = state >> in_bits(half_bits_, t);
            }
        }
    }

   private:
    uint16_t* cost(int tile, int step) { return costs_[tile].data() + size_t(step) * size_t(stride_); }

    static size_t ring(int position) { return size_t(position + TILE_WEIGHTS) % TILE_WEIGHTS; }

    void forward(const Targets (&targets)[ENCODE_TILES], int first, int steps) {
        for (int step = 0; step < steps; step++) {
            const int position = int(ring(first + step)), edges = out_edges(half_bits_, position);
            ViterbiTask task{table_.at(position).data(), edges, STATES / edges, in_bits(half_bits_, position),
                             table_.clamp, {}, {}, {}, {}};
            for (int tile = 0; tile < ENCODE_TILES; tile++) {
                task.target[tile] = targets[tile][size_t(position)];
                task.from[tile] = cost(tile, step);
                task.to[tile] = cost(tile, step + 1);
            }
            kernels_.viterbi(task);
            for (int tile = 0; tile < ENCODE_TILES; tile++) {
                if (task.least[tile] < (table_.clamp ? table_.clamp * table_.clamp : 16384)) continue;
                for (int edge = 0; edge < edges; edge++) task.to[tile][edge] -= task.least[tile];
            }
        }
    }

    // The state that leads to an edge most cheaply, the first of equals.
    int winner(const Targets& targets, int tile, int first, int step, int edge) {
        const int position = int(ring(first + step)), edges = out_edges(half_bits_, position);
        const int in_shift = in_bits(half_bits_, position);
        const uint16_t* before = cost(tile, step);
        const int16_t* value = table_.at(position).data() + table_index(in_shift, edges, edge);
        int best_cost = 1 << 30, best = 0;
        for (int state = edge; state < STATES; state += edges, value += ENCODE_GROUP) {
            const int total = before[state >> in_shift] + table_.square(*value - targets[size_t(position)]);
            if (total < best_cost) {
                best_cost = total;
                best = state;
            }
        }
        return best;
    }

    const Kernels& kernels_;
    int half_bits_;
    const SearchTable& table_;
    int64_t stride_;
    std::vector<uint16_t> costs_[ENCODE_TILES];  // [position][edge]
};

void pack(const States& states, int half_bits, uint32_t* tile) {
    std::fill_n(tile, tile_dwords(half_bits), 0u);
    for (int t = 0; t < TILE_WEIGHTS; t++) {
        for (int bit = 0; bit < window_step(half_bits, t); bit++) {
            const int at = window_end(half_bits, t) - 1 - bit;
            tile[at / 32] |= uint32_t(states[size_t(t)] >> bit & 1) << (31 - at % 32);
        }
    }
}

}  // namespace

double encode(const Kernels& kernels, const float* weights, int64_t stride, int64_t rows, int64_t columns,
              int half_bits, int codebook, uint16_t* trellis, int threads) {
    const SearchTable& table = search_table(half_bits, codebook);
    const uint16_t* decoded = codebook_table(codebook);
    uint32_t* tiles_out = reinterpret_cast<uint32_t*>(trellis);
    const int64_t column_tiles = columns / TILE, tiles = rows / TILE * column_tiles;
    const int64_t pieces = (tiles + PIECE - 1) / PIECE;
    std::vector<double> errors(static_cast<size_t>(pieces));
    std::vector<std::unique_ptr<Search>> searches(static_cast<size_t>(std::max(1, threads)));
    const auto source = [&](int64_t index, int t) {
        const int64_t row = index / column_tiles * TILE + position_row(t);
        return weights[row * stride + index % column_tiles * TILE + position_column(t)];
    };
    parallel_for(pieces, threads, [&](int64_t piece, int thread) {
        std::unique_ptr<Search>& search = searches[size_t(thread)];
        if (!search) search = std::make_unique<Search>(kernels, half_bits, table);
        const int64_t end = std::min(tiles, (piece + 1) * PIECE);
        for (int64_t first = piece * PIECE; first < end; first += ENCODE_TILES) {
            Targets targets[ENCODE_TILES] = {};
            States states[ENCODE_TILES];
            const int count = int(std::min<int64_t>(ENCODE_TILES, end - first));
            for (int i = 0; i < count; i++) {
                for (int t = 0; t < TILE_WEIGHTS; t++) {
                    const float value = std::clamp(source(first + i, t), table.least, table.most);
                    // No integer stands for NaN: the squared error shows that there was one.
                    targets[i][size_t(t)] = std::isnan(value) ? int16_t(0) : int16_t(std::round(value * table.scale));
                }
            }
            search->run(targets, states);
            for (int i = 0; i < count; i++) {
                uint32_t* tile = tiles_out + (first + i) * tile_dwords(half_bits);
                pack(states[i], half_bits, tile);
                for (int t = 0; t < TILE_WEIGHTS; t++) {
                    const double error = source(first + i, t) - half_to_float(decoded[window(tile, half_bits, t)]);
                    errors[size_t(piece)] += error * error;
                }
            }
        }
    });
    double sum = 0;
    for (const double error : errors) sum += error;
    return sum;
}

}  // namespace exl3

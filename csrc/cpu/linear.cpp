#include "linear.h"

#include <algorithm>
#include <vector>

#include "format.h"
#include "parallel.h"
#include "weights.h"

namespace exl3 {
namespace {

constexpr int64_t CHUNK_ROWS = 256;       // rows whose activations are held at once
constexpr int64_t STRIP_BLOCKS = 8;       // 128-column blocks of a unit of few rows, where there are enough
constexpr int64_t PARALLEL_WORK = 1 << 16;  // weights or activations below which one thread is faster

thread_local Scratch call_scratch;

struct ShardView {
    const exl3_shard* shard;
    Weights weights;
    int64_t output;  // first column of y
    Rows rows;
};

// Columns [first, first + blocks) · 128 of a shard.
struct Unit {
    const ShardView* view;
    int64_t first, blocks;
};

class Linear {
   public:
    Linear(const Kernels& kernels, const exl3_linear_call& call) : kernels_(kernels), call_(call) {
        const uint16_t *trellis = call.trellis, *suh = call.suh, *svh = call.svh;
        int64_t output = 0;
        for (int i = 0; i < call.shard_count; i++) {
            const exl3_shard& shard = call.shards[i];
            const Weights weights{reinterpret_cast<const uint32_t*>(trellis), suh, svh, shard.in_features,
                                  shard.out_features, int(shard.half_bits), int(shard.codebook)};
            views_.push_back({&shard, weights, output, {}});
            trellis += shard.in_features / TILE * (shard.out_features / TILE) * 8 * shard.half_bits;
            suh += shard.in_features;
            svh += shard.out_features;
            output += shard.crop_size;
            widest_ = std::max(widest_, shard.in_features);
            weights_ += shard.in_features * shard.out_features;
        }
    }

    void run() {
        const int64_t most = std::min(call_.rows, CHUNK_ROWS);
        fused_ = call_.rows <= kernels_.strip_rows;
        Layout measure{0};
        place(measure, most);
        Layout layout{reinterpret_cast<uintptr_t>(call_scratch.reserve(measure.used))};
        place(layout, most);
        for (int64_t first = 0; first < call_.rows; first += CHUNK_ROWS) {
            first_row_ = first;
            rows_ = std::min(CHUNK_ROWS, call_.rows - first);
            prepare();
            multiply();
        }
    }

   private:
    int threads(int64_t work) const { return work < PARALLEL_WORK ? 1 : std::max(1, int(call_.threads)); }

    void place(Layout& layout, int64_t rows) {
        for (ShardView& view : views_) {
            view.rows = place_rows(layout, rows, view.weights.in_features, view.weights.codebook);
        }
        const int64_t members = std::max(1, int(call_.threads));
        unit_columns_ = fused_ ? STRIP_BLOCKS * BLOCK : BLOCK;
        sums_ = layout.take<float>(members * rows * unit_columns_);
        panels_ = layout.take<int16_t>(members * PANEL_COLUMNS * BLOCK);
        rows_capacity_ = rows;
    }

    void prepare() {
        const int64_t shards = int64_t(views_.size());
        const int64_t element = call_.dtype == FLOAT32 ? 4 : 2;
        parallel_for(rows_ * shards, threads(rows_ * shards * widest_), [&](int64_t unit, int) {
            const ShardView& view = views_[size_t(unit % shards)];
            const int64_t row = unit / shards;
            const char* x = static_cast<const char*>(call_.x) + (first_row_ + row) * call_.x_stride * element;
            const int64_t in = std::min(call_.columns, view.shard->in_features);
            kernels_.prepare({x, call_.dtype, in, view.weights.suh, view.weights.codebook, view.rows, row});
            if (!fused_ && kernels_.arrange) kernels_.arrange(view.rows, row);
        });
    }

    void multiply() {
        const int count = threads(weights_ * rows_);
        std::vector<Unit> units;
        for (const ShardView& view : views_) {
            const int64_t blocks = view.shard->out_features / BLOCK;
            int64_t step = 1;
            if (fused_) step = std::clamp<int64_t>(blocks / (4 * count), 1, STRIP_BLOCKS);
            for (int64_t first = 0; first < blocks; first += step) {
                units.push_back({&view, first, std::min(step, blocks - first)});
            }
        }
        // Few columns on many threads: cut the rows as well.
        int64_t parts = 1;
        if (!fused_) {
            const int64_t wanted = (4 * count + int64_t(units.size()) - 1) / int64_t(units.size());
            parts = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, rows_ / 32));
        }
        parallel_for(int64_t(units.size()) * parts, count, [&](int64_t index, int thread) {
            const Unit& unit = units[size_t(index / parts)];
            const int64_t part = index % parts;
            const int64_t begin = rows_ * part / parts, end = rows_ * (part + 1) / parts;
            float* sums = sums_ + thread * rows_capacity_ * unit_columns_;
            const ShardView& view = *unit.view;
            if (fused_) {
                strip_sums(kernels_, view.weights, view.rows, unit.first, unit.blocks, sums, unit_columns_);
            } else {
                int16_t* panel = panels_ + thread * PANEL_COLUMNS * BLOCK;
                panel_sums(kernels_, view.weights, view.rows, begin, end, unit.first, panel, sums, unit_columns_);
            }
            for (int64_t row = begin; row < end; row++) {
                for (int64_t block = 0; block < unit.blocks; block++) {
                    finish(unit, row, block, sums + (row - begin) * unit_columns_ + block * BLOCK);
                }
            }
        });
    }

    void finish(const Unit& unit, int64_t row, int64_t block, const float* sums) const {
        const ShardView& view = *unit.view;
        const int64_t column = (unit.first + block) * BLOCK;
        const int64_t crop_end = view.shard->crop_start + view.shard->crop_size;
        const int64_t first = std::max(column, view.shard->crop_start), last = std::min(column + BLOCK, crop_end);
        if (first >= last) return;
        const int64_t output = view.output + first - view.shard->crop_start;
        const auto at = [](const void* base, int dtype, int64_t i) {
            return static_cast<const char*>(base) + i * (dtype == FLOAT32 ? 4 : 2);
        };
        const void* bias = call_.bias ? at(call_.bias, call_.bias_dtype, output) : nullptr;
        void* y = const_cast<char*>(at(call_.y, call_.dtype, (first_row_ + row) * call_.y_stride + output));
        kernels_.finish({sums, view.rows.constant[row], view.rows.gain[row], view.weights.svh + column, bias,
                         call_.bias_dtype, y, call_.dtype, int(first - column), int(last - first)});
    }

    const Kernels& kernels_;
    const exl3_linear_call& call_;
    std::vector<ShardView> views_;
    int64_t widest_ = 0, weights_ = 0, first_row_ = 0, rows_ = 0, rows_capacity_ = 0, unit_columns_ = 0;
    bool fused_ = false;
    float* sums_ = nullptr;
    int16_t* panels_ = nullptr;
};

}  // namespace

void linear(const Kernels& kernels, const exl3_linear_call& call) { Linear(kernels, call).run(); }

}  // namespace exl3

#include "linear.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "format.h"
#include "parallel.h"

namespace exl3 {
namespace {

constexpr int64_t CHUNK_ROWS = 256;       // rows whose activations are held at once
constexpr int64_t STRIP_BLOCKS = 8;       // 128-column blocks of a unit of few rows, where there are enough
constexpr int64_t PARALLEL_WORK = 1 << 16;  // weights or activations below which one thread is faster

struct AlignedDelete {
    void operator()(char* bytes) const { ::operator delete(bytes, std::align_val_t(64)); }
};

// Memory that a thread's calls reuse, since fresh pages would be zeroed by the system at each call.
class Scratch {
   public:
    char* reserve(size_t size) {
        if (size > size_) {
            bytes_.reset();
            bytes_.reset(static_cast<char*>(::operator new(size, std::align_val_t(64))));
            size_ = size;
        }
        return bytes_.get();
    }

   private:
    std::unique_ptr<char, AlignedDelete> bytes_;
    size_t size_ = 0;
};

thread_local Scratch call_scratch;

// Hands out aligned pieces; with base 0 it only measures. The base is a number: no pointer may be added to null.
struct Layout {
    uintptr_t base;
    size_t used = 0;

    template <class T>
    T* take(int64_t count) {
        T* piece = reinterpret_cast<T*>(base + used);
        used += (size_t(count) * sizeof(T) + 63) / 64 * 64;
        return piece;
    }
};

struct ShardView {
    const exl3_shard* shard;
    const uint32_t* tiles;
    const uint16_t* suh;
    const uint16_t* svh;
    int64_t output;  // first column of y
    Rows rows;

    int64_t row_dwords() const { return shard->out_features / TILE * tile_dwords(int(shard->half_bits)); }
    const uint32_t* tile(int64_t k_tile, int64_t column_tile) const {
        return tiles + k_tile * row_dwords() + column_tile * tile_dwords(int(shard->half_bits));
    }
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
            views_.push_back({&shard, reinterpret_cast<const uint32_t*>(trellis), suh, svh, output, {}});
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
            const int64_t k = view.shard->in_features, blocks = k / (block_tiles(int(view.shard->codebook)) * TILE);
            view.rows = {layout.take<int16_t>(rows * k + SPARE_ROWS * BLOCK),
                         layout.take<float>(rows * blocks),
                         layout.take<int32_t>(rows * blocks),
                         layout.take<float>(rows),
                         layout.take<float>(rows),
                         rows,
                         k,
                         blocks};
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
            kernels_.prepare({x, call_.dtype, in, view.suh, int(view.shard->codebook), view.rows, row});
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
            fused_ ? strip(unit, sums) : panels(unit, begin, end, sums, panels_ + thread * PANEL_COLUMNS * BLOCK);
            for (int64_t row = begin; row < end; row++) {
                for (int64_t block = 0; block < unit.blocks; block++) {
                    finish(unit, row, block, sums + (row - begin) * unit_columns_ + block * BLOCK);
                }
            }
        });
    }

    void strip(const Unit& unit, float* sums) const {
        const ShardView& view = *unit.view;
        kernels_.strip({view.tile(0, unit.first * (BLOCK / TILE)), view.row_dwords(), int(view.shard->half_bits),
                        int(view.shard->codebook), int(unit.blocks * (BLOCK / TILE)), view.rows, sums, unit_columns_});
    }

    void panels(const Unit& unit, int64_t begin, int64_t end, float* sums, int16_t* panel) const {
        const ShardView& view = *unit.view;
        const int codebook = int(view.shard->codebook), half_bits = int(view.shard->half_bits);
        for (int64_t block = 0; block < view.rows.blocks; block++) {
            for (int column = 0; column < BLOCK; column += PANEL_COLUMNS) {
                const int64_t column_tile = (unit.first * BLOCK + column) / TILE;
                kernels_.panel({view.tile(block * block_tiles(codebook), column_tile), view.row_dwords(), half_bits,
                                codebook, panel});
                kernels_.multiply({panel, codebook, view.rows, begin, end - begin, block, sums + column,
                                   unit_columns_});
            }
        }
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
        kernels_.finish({sums, view.rows.constant[row], view.rows.gain[row], view.svh + column, bias,
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

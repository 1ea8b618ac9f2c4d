#include "moe_plan.h"

#include <algorithm>
#include <new>

#include "activation.h"

namespace exl3 {
namespace {

constexpr int64_t MOST_BYTES = int64_t(256) << 20;  // of slots that are computed together, about
constexpr int64_t STRIP_BLOCKS = 8;    // of columns of few rows in a unit, where there are enough units
constexpr int64_t UNITS_A_THREAD = 8;  // of columns, where there are as many
constexpr int64_t MOST_ROWS = 256;     // of a unit of columns
constexpr int64_t PART_ROWS = 32;      // into fewer, rows are not cut
constexpr int64_t INPUT_ROWS = 4;      // of a unit that rotates
constexpr int64_t COMBINE_BLOCKS = 4;  // of columns of a unit that adds, where tokens are few

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t id_at(const exl3_moe_call& call, int64_t slot) {
    return call.id_bytes == 8 ? static_cast<const int64_t*>(call.ids)[slot] : static_cast<const int32_t*>(call.ids)[slot];
}

Weights weights_of(const exl3_projection& p, const exl3_flat& flat) {
    return {reinterpret_cast<const uint32_t*>(flat.trellis + p.trellis), flat.suh + p.suh, flat.svh + p.svh,
            p.in_features, p.out_features, int(p.half_bits), int(p.codebook)};
}

// Whether two projections take the same rotated rows.
bool same_rows(const exl3_projection& a, const exl3_projection& b) {
    return a.suh == b.suh && a.in_features == b.in_features && a.codebook == b.codebook;
}

class Planner {
   public:
    Planner(const Kernels& kernels, const exl3_moe_call& call, int threads, MoePlan& plan)
        : kernels_(kernels), call_(call), threads_(threads), plan_(plan) {}

    // Groups the slots: counts of experts, then the places of each expert's slots, ascending in both.
    MoeFault group(Layout& layout) {
        const int64_t slots = plan_.tokens * call_.top_k, first = plan_.first_token * call_.top_k;
        const int64_t most = std::min(slots, call_.experts);
        plan_.places = layout.take<int32_t>(slots);
        plan_.slots = layout.take<int32_t>(slots);
        plan_.groups = layout.take<Group>(most);
        plan_.down_left = layout.take<std::atomic<int32_t>>(1);
        int32_t* next = layout.take<int32_t>(call_.experts);
        if (!layout.base) return MoeFault::NONE;
        std::fill_n(next, call_.experts, 0);
        for (int64_t slot = 0; slot < slots; slot++) {
            const int64_t expert = id_at(call_, first + slot);
            if (expert >= 0 && expert < call_.experts) next[expert]++;
        }
        plan_.group_count = 0;
        int64_t place = 0;
        for (int64_t expert = 0; expert < call_.experts; expert++) {
            const int64_t count = next[expert];
            if (!count) continue;
            const MoeFault fault = check_expert(call_, expert);
            if (fault != MoeFault::NONE) return fault;
            open(*new (&plan_.groups[plan_.group_count++]) Group{}, expert, place, count);
            next[expert] = int32_t(place);
            place += count;
        }
        plan_.slot_count = place;
        for (int64_t slot = 0; slot < slots; slot++) {
            const int64_t expert = id_at(call_, first + slot);
            const bool here = expert >= 0 && expert < call_.experts;
            plan_.places[slot] = here ? next[expert] : -1;
            if (here) plan_.slots[next[expert]++] = int32_t(slot);
        }
        return MoeFault::NONE;
    }

    // Memory of the groups' rows, of the threads, and of the units.
    void place(Layout& layout) {
        for (int64_t i = 0; i < plan_.group_count; i++) {
            Group& group = plan_.groups[i];
            const exl3_projection* p = group.projections;
            const int down = call_.projections - 1;
            group.inputs[0] = place_rows(layout, group.count, p[0].in_features, int(p[0].codebook));
            if (down == 2) {
                group.inputs[1] = same_rows(p[0], p[1])
                                      ? group.inputs[0]
                                      : place_rows(layout, group.count, p[1].in_features, int(p[1].codebook));
            }
            group.hidden = place_rows(layout, group.count, p[down].in_features, int(p[down].codebook));
        }
        place_rest(layout, plan_.slot_count);
    }

    // An upper bound of both, for any routing of experts whose rows are no wider.
    void place_most(Layout& layout, int64_t widest_input, int64_t widest_hidden) {
        group(layout);
        const int64_t slots = plan_.tokens * call_.top_k, groups = std::min(slots, call_.experts);
        for (const int64_t k : {widest_input, widest_input, widest_hidden}) {
            place_rows(layout, slots, k, INST3);  // whose blocks are the shorter ones
            layout.take<char>(groups * (SPARE_ROWS * BLOCK * 2 + 5 * 64));
        }
        plan_.group_count = groups;
        place_rest(layout, slots);
    }

    void list() {
        plan_.unit_count = 0;
        const int64_t step_up = step(plan_.up_blocks), step_down = step(plan_.down_blocks);
        each_group([&](Group& group, int32_t index) {
            group.inputs_left.store(rows(Step::INPUTS, index, group.count), std::memory_order_relaxed);
        });
        each_group([&](Group& group, int32_t index) {
            group.up_left.store(columns(Step::UP, index, plan_.up_blocks, step_up), std::memory_order_relaxed);
        });
        each_group([&](Group& group, int32_t index) {
            group.hidden_left.store(rows(Step::HIDDEN, index, group.count), std::memory_order_relaxed);
        });
        int32_t downs = 0;
        each_group([&](Group&, int32_t index) { downs += columns(Step::DOWN, index, plan_.down_blocks, step_down); });
        new (plan_.down_left) std::atomic<int32_t>(downs);
        const int64_t width = plan_.tokens < 2 * threads_ ? COMBINE_BLOCKS : plan_.down_blocks;
        for (int64_t token = 0; token < plan_.tokens; token++) {
            for (int64_t block = 0; block < plan_.down_blocks; block += width) {
                const int64_t count = std::min(width, plan_.down_blocks - block);
                add({Step::COMBINE, 0, int32_t(block), int32_t(count), int32_t(token), int32_t(token + 1)});
            }
        }
    }

   private:
    void open(Group& group, int64_t expert, int64_t place, int64_t count) const {
        group.projections = call_.table + expert * call_.projections;
        for (int i = 0; i < call_.projections; i++) {
            const exl3_flat& flat = i == call_.projections - 1 ? call_.w2 : call_.w13;
            const exl3_projection& p = group.projections[i];
            group.weights[i] = weights_of(p, flat);
            group.bias[i] = flat.bias && p.bias >= 0 ? flat.bias + p.bias : nullptr;
        }
        group.place = place;
        group.count = count;
        group.few = count <= kernels_.strip_rows;
    }

    void place_rest(Layout& layout, int64_t slots) {
        plan_.activated = layout.take<float>(slots * call_.intermediate);
        plan_.values = layout.take<float>(slots * call_.hidden);
        plan_.sums_stride[0] = STRIP_BLOCKS * BLOCK;
        plan_.sums_stride[1] = BLOCK;
        const int64_t few = std::min<int64_t>(slots, kernels_.strip_rows), many = std::min(slots, MOST_ROWS);
        const int64_t sums = std::max(few * plan_.sums_stride[0], many * plan_.sums_stride[1]);
        plan_.threads = layout.take<ThreadScratch>(threads_);
        for (int i = 0; i < threads_; i++) {
            const ThreadScratch own{{layout.take<float>(sums), layout.take<float>(sums)},
                                    layout.take<float>(call_.hidden),
                                    layout.take<int16_t>(PANEL_COLUMNS * BLOCK)};
            if (layout.base) plan_.threads[i] = own;
        }
        // Units of columns are cut into at most count / PART_ROWS + 1 parts of rows.
        const int64_t parts = slots / PART_ROWS + plan_.group_count;
        plan_.units = layout.take<MoeUnit>((plan_.up_blocks + plan_.down_blocks) * parts + 2 * slots +
                                           plan_.tokens * ceil_div(plan_.down_blocks, COMBINE_BLOCKS));
    }

    template <class Function>
    void each_group(Function&& function) {
        for (int64_t i = 0; i < plan_.group_count; i++) function(plan_.groups[i], int32_t(i));
    }

    void add(const MoeUnit& unit) { plan_.units[plan_.unit_count++] = unit; }

    // Blocks of columns of a unit of few rows.
    int64_t step(int64_t blocks) const {
        return std::clamp<int64_t>(blocks * plan_.group_count / (UNITS_A_THREAD * threads_), 1, STRIP_BLOCKS);
    }

    int32_t rows(Step step, int32_t group, int64_t count) {
        for (int64_t row = 0; row < count; row += INPUT_ROWS) {
            add({step, group, 0, 0, int32_t(row), int32_t(std::min(row + INPUT_ROWS, count))});
        }
        return int32_t(ceil_div(count, INPUT_ROWS));
    }

    int32_t columns(Step step, int32_t index, int64_t blocks, int64_t width) {
        const Group& group = plan_.groups[index];
        if (!group.few) width = 1;
        // Few columns on many threads: rows are cut as well.
        const int64_t wanted = ceil_div(UNITS_A_THREAD / 2 * threads_, blocks * plan_.group_count);
        int64_t parts = ceil_div(group.count, MOST_ROWS);
        if (!group.few) parts = std::max(parts, std::min(wanted, group.count / PART_ROWS));
        for (int64_t block = 0; block < blocks; block += width) {
            for (int64_t part = 0; part < parts; part++) {
                add({step, index, int32_t(block), int32_t(std::min(width, blocks - block)),
                     int32_t(group.count * part / parts), int32_t(group.count * (part + 1) / parts)});
            }
        }
        return int32_t(ceil_div(blocks, width) * parts);
    }

    const Kernels& kernels_;
    const exl3_moe_call& call_;
    const int threads_;
    MoePlan& plan_;
};

MoePlan empty_plan(const exl3_moe_call& call, int64_t first, int64_t tokens) {
    MoePlan plan{};
    plan.first_token = first;
    plan.tokens = tokens;
    plan.up_blocks = ceil_div(call.intermediate, BLOCK);
    plan.down_blocks = ceil_div(call.hidden, BLOCK);
    return plan;
}

}  // namespace

int64_t tokens_at_once(const exl3_moe_call& call) {
    const int64_t slot = 8 * call.hidden + 6 * call.intermediate;  // bytes of the rows of one
    return std::clamp<int64_t>(MOST_BYTES / (slot * call.top_k), 1, 1 << 14);
}

MoeFault plan_tokens(const Kernels& kernels, const exl3_moe_call& call, int threads, int64_t first, int64_t tokens,
                     Scratch& scratch, MoePlan& plan) {
    plan = empty_plan(call, first, tokens);
    Planner planner(kernels, call, threads, plan);
    Layout measure{0};
    planner.group(measure);
    // Grouped first, since the rest of the memory depends on it; if that takes more, once more in the larger.
    for (;;) {
        Layout layout{reinterpret_cast<uintptr_t>(scratch.reserve(measure.used))};
        const MoeFault fault = planner.group(layout);
        if (fault != MoeFault::NONE) return fault;
        measure = {0, layout.used};
        planner.place(measure);
        if (measure.used <= scratch.size()) {
            planner.place(layout);
            planner.list();
            return MoeFault::NONE;
        }
    }
}

size_t most_scratch(const Kernels& kernels, const exl3_moe_call& call, const exl3_context& context, MoeFault& fault) {
    int64_t widest_input = 0, widest_hidden = 0;
    for (int64_t expert = 0; expert < call.experts; expert++) {
        fault = check_expert(call, expert);
        if (fault != MoeFault::NONE) return 0;
        const exl3_projection* row = call.table + expert * call.projections;
        widest_hidden = std::max(widest_hidden, row[call.projections - 1].in_features);
        for (int i = 0; i + 1 < call.projections; i++) widest_input = std::max(widest_input, row[i].in_features);
    }
    MoePlan plan = empty_plan(call, 0, std::min(call.tokens, tokens_at_once(call)));
    Layout measure{0};
    Planner(kernels, call, context.pool ? context.pool->threads() : 1, plan).place_most(measure, widest_input, widest_hidden);
    return measure.used;
}

}  // namespace exl3

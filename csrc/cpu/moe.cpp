#include "moe.h"

#include <algorithm>

#include "float16.h"
#include "moe_plan.h"
#include "parallel.h"

namespace exl3 {
namespace {

constexpr int64_t PARALLEL_WORK = 1 << 16;  // weights below which one thread is faster

int64_t element_size(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

// The units of one part of the tokens.
class Experts {
   public:
    Experts(const Kernels& kernels, const exl3_moe_call& call, const MoePlan& plan, exl3_context& context)
        : kernels_(kernels), call_(call), plan_(plan), context_(context) {}

    void run(const MoeUnit& unit, int thread) const {
        Group& group = plan_.groups[unit.group];
        switch (unit.step) {
            case Step::INPUTS:
                rotate_inputs(group, unit, plan_.threads[thread].row);
                return finished(group.inputs_left);
            case Step::UP:
                wait(group.inputs_left);
                multiply_up(group, unit, plan_.threads[thread]);
                return finished(group.up_left);
            case Step::HIDDEN:
                wait(group.up_left);
                rotate_hidden(group, unit);
                return finished(group.hidden_left);
            case Step::DOWN:
                wait(group.hidden_left);
                multiply_down(group, unit, plan_.threads[thread]);
                return finished(*plan_.down_left);
            case Step::COMBINE:
                wait(*plan_.down_left);
                return call_.slots ? store_slots(unit) : combine(unit);
        }
    }

   private:
    void wait(const std::atomic<int32_t>& left) const {
        context_.gate.wait(context_.spin, [&] { return left.load() == 0; });
    }
    void finished(std::atomic<int32_t>& left) const {
        if (left.fetch_sub(1) == 1) context_.gate.notify();
    }

    void prepare(const void* x, int dtype, int64_t in, const Weights& weights, const Rows& rows, int64_t row,
                 bool few) const {
        kernels_.prepare({x, dtype, in, weights.suh, weights.codebook, rows, row});
        if (!few && kernels_.arrange) kernels_.arrange(rows, row);
    }

    void rotate_inputs(const Group& group, const MoeUnit& unit, float* weighted) const {
        const bool both = call_.projections == 3 && group.inputs[1].values != group.inputs[0].values;
        for (int64_t row = unit.begin; row < unit.end; row++) {
            const int64_t slot = plan_.first_token * call_.top_k + plan_.slots[group.place + row];
            const void* x = static_cast<const char*>(call_.x) +
                            slot / call_.top_k * call_.x_stride * element_size(call_.dtype);
            int dtype = call_.dtype;
            if (call_.weight_on_input) {
                scale(x, call_.weights[slot], weighted);
                x = weighted;
                dtype = FLOAT32;
            }
            for (int i = 0; i < (both ? 2 : 1); i++) {
                prepare(x, dtype, call_.hidden, group.weights[i], group.inputs[i], row, group.few);
            }
        }
    }

    void scale(const void* x, float weight, float* out) const {
        for (int64_t i = 0; i < call_.hidden; i++) {
            const float value = call_.dtype == FLOAT32   ? static_cast<const float*>(x)[i]
                                : call_.dtype == FLOAT16 ? half_to_float(static_cast<const uint16_t*>(x)[i])
                                                         : bfloat_to_float(static_cast<const uint16_t*>(x)[i]);
            out[i] = value * weight;
        }
    }

    void multiply(const Group& group, const Weights& weights, const Rows& rows, const MoeUnit& unit,
                  const ThreadScratch& own, float* sums) const {
        if (group.few) return strip_sums(kernels_, weights, rows, unit.first, unit.count, sums, plan_.sums_stride[0]);
        panel_sums(kernels_, weights, rows, unit.begin, unit.end, unit.first, own.panel, sums, plan_.sums_stride[1]);
    }

    // Outputs of a row in one block of columns, in float32.
    void finish(const Group& group, int projection, const Rows& rows, int64_t row, int64_t block, int64_t size,
                const float* sums, float* out) const {
        const float* bias = group.bias[projection];
        kernels_.finish({sums, rows.constant[row], rows.gain[row], group.weights[projection].svh + block * BLOCK,
                         bias ? bias + block * BLOCK : nullptr, FLOAT32, out, FLOAT32, 0, int(size)});
    }

    void multiply_up(const Group& group, const MoeUnit& unit, const ThreadScratch& own) const {
        const int count = call_.projections - 1;
        for (int i = 0; i < count; i++) multiply(group, group.weights[i], group.inputs[i], unit, own, own.sums[i]);
        const int64_t stride = plan_.sums_stride[group.few ? 0 : 1];
        for (int64_t row = unit.begin; row < unit.end; row++) {
            float* out = plan_.activated + (group.place + row) * call_.intermediate;
            for (int64_t block = unit.first; block < unit.first + unit.count; block++) {
                const int64_t size = std::min<int64_t>(BLOCK, call_.intermediate - block * BLOCK);
                const int64_t at = (row - unit.begin) * stride + (block - unit.first) * BLOCK;
                float results[2][BLOCK];
                for (int i = 0; i < count; i++) {
                    finish(group, i, group.inputs[i], row, block, size, own.sums[i] + at, results[i]);
                }
                kernels_.activate({call_.activation, call_.alpha, call_.beta, call_.limit, results[0],
                                   results[count - 1], out + block * BLOCK, int(size)});
            }
        }
    }

    void rotate_hidden(const Group& group, const MoeUnit& unit) const {
        const Weights& down = group.weights[call_.projections - 1];
        for (int64_t row = unit.begin; row < unit.end; row++) {
            const float* values = plan_.activated + (group.place + row) * call_.intermediate;
            prepare(values, FLOAT32, call_.intermediate, down, group.hidden, row, group.few);
        }
    }

    void multiply_down(const Group& group, const MoeUnit& unit, const ThreadScratch& own) const {
        const int down = call_.projections - 1;
        multiply(group, group.weights[down], group.hidden, unit, own, own.sums[0]);
        const int64_t stride = plan_.sums_stride[group.few ? 0 : 1];
        for (int64_t row = unit.begin; row < unit.end; row++) {
            float* out = plan_.values + (group.place + row) * call_.hidden;
            for (int64_t block = unit.first; block < unit.first + unit.count; block++) {
                const int64_t size = std::min<int64_t>(BLOCK, call_.hidden - block * BLOCK);
                const int64_t at = (row - unit.begin) * stride + (block - unit.first) * BLOCK;
                finish(group, down, group.hidden, row, block, size, own.sums[0] + at, out + block * BLOCK);
            }
        }
    }

    // The terms of some slots of a token, in a unit's columns.
    CombineTask terms(const MoeUnit& unit, int64_t choice, int64_t count) const {
        const int64_t slot = unit.begin * call_.top_k + choice, column = unit.first * BLOCK;
        const float* weights = call_.weights + plan_.first_token * call_.top_k + slot;
        return {plan_.values, call_.hidden, plan_.places + slot, call_.weight_on_input ? nullptr : weights, count, column,
                std::min(unit.count * int64_t(BLOCK), call_.hidden - column), nullptr, call_.out_dtype};
    }

    void combine(const MoeUnit& unit) const {
        CombineTask task = terms(unit, 0, call_.top_k);
        const int64_t element = (plan_.first_token + unit.begin) * call_.out_stride + task.first;
        task.out = static_cast<char*>(call_.out) + element * element_size(call_.out_dtype);
        kernels_.combine(task);
    }

    void store_slots(const MoeUnit& unit) const {
        for (int64_t choice = 0; choice < call_.top_k; choice++) {
            CombineTask task = terms(unit, choice, 1);
            if (*task.places < 0) continue;
            const int64_t row = (plan_.first_token + unit.begin) * call_.top_k + choice;
            task.out = static_cast<float*>(call_.out) + row * call_.out_stride + task.first;
            kernels_.combine(task);
        }
    }

    const Kernels& kernels_;
    const exl3_moe_call& call_;
    const MoePlan& plan_;
    exl3_context& context_;
};

}  // namespace

MoeFault run_experts(const Kernels& kernels, const exl3_moe_call& call, exl3_context& context) {
    const int64_t at_once = tokens_at_once(call), parts = (call.tokens + at_once - 1) / at_once;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t first = call.tokens * part / parts, last = call.tokens * (part + 1) / parts;
        const int most = context.pool ? context.pool->threads() : std::clamp(int(call.threads), 1, MOST_THREADS);
        MoePlan plan;
        const MoeFault fault = plan_tokens(kernels, call, most, first, last - first, context.scratch, plan);
        if (fault != MoeFault::NONE) return fault;
        const Experts experts(kernels, call, plan, context);
        const auto run = [&](int64_t unit, int thread) { experts.run(plan.units[unit], thread); };
        const UnitBody body = unit_body(run);
        const int64_t work = plan.slot_count * call.hidden * call.intermediate;
        if (context.pool && work >= PARALLEL_WORK) {
            context.pool->run(plan.unit_count, body.function, body.context);
        } else {
            parallel_for(plan.unit_count, work < PARALLEL_WORK ? 1 : most, body.function, body.context);
        }
    }
    return MoeFault::NONE;
}

}  // namespace exl3

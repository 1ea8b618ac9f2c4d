// Whether the arguments of a call of routed experts are those of a layer.
#include "activation.h"
#include "format.h"
#include "moe.h"

namespace exl3 {
namespace {

constexpr int64_t MOST_FEATURES = 1 << 24, MOST_CHOICES = 1 << 16, MOST_EXPERTS = 1 << 24;
constexpr int64_t MOST_ROWS = int64_t(1) << 40;

bool within(int64_t value, int64_t least, int64_t most) { return value >= least && value <= most; }

bool known_dtype(int dtype) { return within(dtype, FLOAT32, BFLOAT16); }

// Whether [offset, offset + count) lies in so many elements.
bool inside(int64_t offset, int64_t count, int64_t size) { return offset >= 0 && count <= size && offset <= size - count; }

bool valid(const exl3_projection& p, const exl3_flat& flat, int64_t in, int64_t out) {
    const bool sizes = within(p.in_features, in, MOST_FEATURES) && p.in_features % BLOCK == 0 &&
                       within(p.out_features, out, MOST_FEATURES) && p.out_features % BLOCK == 0;
    if (!sizes || !known_rate(p.half_bits, p.codebook)) return false;
    const int64_t words = p.in_features / TILE * (p.out_features / TILE) * 8 * p.half_bits;
    // Vectors of dwords are read from a trellis.
    if (p.trellis % 2 != 0 || !inside(p.trellis, words, flat.trellis_size)) return false;
    if (!inside(p.suh, p.in_features, flat.suh_size) || !inside(p.svh, p.out_features, flat.svh_size)) return false;
    return !flat.bias || p.bias < 0 || inside(p.bias, out, flat.bias_size);
}

}  // namespace

MoeFault check_call(const exl3_moe_call& call) {
    const bool sizes = within(call.tokens, 0, MOST_ROWS) && within(call.hidden, 1, MOST_FEATURES) &&
                       within(call.intermediate, 1, MOST_FEATURES) && within(call.top_k, 1, MOST_CHOICES) &&
                       within(call.experts, 0, MOST_EXPERTS) && within(call.x_stride, 0, MOST_ROWS) &&
                       within(call.out_stride, call.hidden, MOST_ROWS);
    if (!sizes) return MoeFault::SIZE;
    if (!known_dtype(call.dtype) || !known_dtype(call.out_dtype)) return MoeFault::DTYPE;
    if (call.id_bytes != 4 && call.id_bytes != 8) return MoeFault::DTYPE;
    if (call.slots && call.out_dtype != FLOAT32) return MoeFault::DTYPE;
    if (!within(call.activation, 0, ACTIVATION_COUNT - 1)) return MoeFault::ACTIVATION;
    if (call.projections != (gated(call.activation) ? 3 : 2)) return MoeFault::ACTIVATION;
    if (call.tokens && !(call.x && call.ids && call.weights && call.out)) return MoeFault::POINTER;
    const auto complete = [](const exl3_flat& flat) { return flat.trellis && flat.suh && flat.svh; };
    if (call.experts && !(call.table && complete(call.w13) && complete(call.w2))) return MoeFault::POINTER;
    return MoeFault::NONE;
}

MoeFault check_expert(const exl3_moe_call& call, int64_t expert) {
    const exl3_projection* row = call.table + expert * call.projections;
    const int down = call.projections - 1;
    bool good = valid(row[down], call.w2, call.intermediate, call.hidden);
    for (int i = 0; i < down; i++) good = good && valid(row[i], call.w13, call.hidden, call.intermediate);
    return good ? MoeFault::NONE : MoeFault::EXPERT;
}

}  // namespace exl3

// Calls of exl3_moe, exl3_moe_reserve and of contexts.
#include "abi_repeat.h"

namespace abi {
namespace {

constexpr int64_t HUGE_SIZES[] = {-1, 0, -127, -128, 1 << 20, int64_t(1) << 32, int64_t(1) << 62, INT64_MAX, INT64_MIN};

// Contexts of some threads, made once: a process that starts threads at every call does little else.
exl3_context* any_context(Input& input) {
    static exl3_context* made[3] = {};
    const int64_t which = input.below(4);
    if (which == 3) return nullptr;
    if (!made[which] && exl3_context_create(int(which) + 1, nullptr, which == 1 ? 0 : 20, &made[which]) != 0)
        fail("exl3_context_create", which);
    return made[which];
}

struct Sizes {
    int64_t trellis = 0, suh = 0, svh = 0, bias = 0;
};

exl3_projection any_projection(Input& input, Sizes& flat, int64_t in, int64_t out) {
    exl3_projection p{};
    p.codebook = input.below(3);
    p.half_bits = 2 * (1 + input.below(8));
    if (p.codebook == 2 && input.once_in(3)) p.half_bits = 3 + 2 * input.below(3);
    p.in_features = (in + 127) / 128 * 128, p.out_features = (out + 127) / 128 * 128;
    p.trellis = flat.trellis, p.suh = flat.suh, p.svh = flat.svh;
    p.bias = input.once_in(4) ? -1 : flat.bias;
    flat.trellis += p.in_features / 16 * (p.out_features / 16) * 8 * p.half_bits;
    flat.suh += p.in_features, flat.svh += p.out_features, flat.bias += out;
    return p;
}

// Numbers of both signs between 1/2 and 2.
void tame(const Buffer& buffer, int32_t dtype) {
    const int64_t width = width_of(dtype);
    const uint32_t drop = dtype == 0 ? 0x7F800000 : dtype == 1 ? 0x7C00 : 0x7F80;
    const uint32_t low = dtype == 0 ? 0x3F000000 : dtype == 1 ? 0x3800 : 0x3F00;
    const uint32_t step = dtype == 0 ? 0x00800000 : dtype == 1 ? 0x0400 : 0x0080;
    for (int64_t i = 0; i + width <= int64_t(buffer.size()); i += width) {
        uint32_t bits = 0;
        std::memcpy(&bits, buffer.get() + i, size_t(width));
        bits = (bits & ~drop) | (low + (bits & step));
        std::memcpy(buffer.get() + i, &bits, size_t(width));
    }
}

// One thing that no call has; whether the row of an expert, which only calls that use it read.
void spoil(Input& input, exl3_moe_call& call, exl3_projection& row, bool& only_row) {
    only_row = false;
    switch (input.below(10)) {
        case 0: call.tokens = input.once_in(2) ? -1 : INT64_MIN; return;
        case 1: call.hidden = input.once_in(2) ? 0 : INT64_MAX; return;
        case 2: call.top_k = input.once_in(2) ? 0 : int64_t(1) << 40; return;
        case 3: call.out_stride = call.hidden - 1; return;
        case 4: call.dtype = 3; return;
        case 5: call.id_bytes = input.once_in(2) ? 0 : 3; return;
        case 6: call.activation = int32_t(input.once_in(2) ? -1 : 9 + input.below(100)); return;
        case 7: call.projections = 5 - call.projections; return;
        case 8: (input.once_in(2) ? call.w13.svh : call.w2.suh) = nullptr; return;
        default: break;
    }
    only_row = true;
    int64_t* fields[] = {&row.trellis, &row.suh, &row.svh, &row.half_bits, &row.in_features, &row.out_features};
    int64_t& field = *fields[input.below(6)];
    const int64_t before = field;
    while (field == before || field == 0) field = input.any(HUGE_SIZES) | (field == 0 ? int64_t(1) << 61 : 0);
}

}  // namespace

void call_moe(Input& input) {
    const bool tamed = input.once_in(4), refused = !tamed && input.once_in(4);
    exl3_moe_call call{};
    call.activation = int32_t(input.below(9));
    call.projections = call.activation < 5 ? 3 : 2;
    call.hidden = 1 + input.below(input.once_in(4) ? 200 : 128), call.intermediate = 1 + input.below(128);
    call.experts = 1 + input.below(3), call.top_k = 1 + input.below(3);
    call.tokens = input.once_in(16) ? input.below(24) : input.below(3);
    call.dtype = int32_t(input.below(3)), call.slots = input.once_in(3);
    call.out_dtype = call.slots ? 0 : int32_t(input.below(3));
    call.id_bytes = input.once_in(2) ? 8 : 4, call.weight_on_input = input.once_in(3);
    call.threads = any_threads(input);
    call.alpha = 1.5f, call.beta = input.once_in(2) ? 0.5f : 0.0f, call.limit = input.once_in(2) ? INFINITY : 3.0f;
    call.context = any_context(input);
    Sizes flats[2];
    std::vector<exl3_projection> table;
    for (int64_t expert = 0; expert < call.experts; expert++) {
        for (int i = 0; i + 1 < call.projections; i++)
            table.push_back(any_projection(input, flats[0], call.hidden, call.intermediate));
        table.push_back(any_projection(input, flats[1], call.intermediate, call.hidden));
    }
    const int64_t slots = call.tokens * call.top_k;
    std::vector<int64_t> ids(size_t(slots), -1);
    for (int64_t& id : ids) id = input.once_in(8) ? (input.once_in(2) ? -1 - input.below(9) : INT32_MAX) : input.below(call.experts);
    if (call.slots && !slots) call.slots = 0;
    const Buffer numbers(input, slots * call.id_bytes), weights(input, slots * 4);
    for (int64_t i = 0; i < slots; i++) {
        const int32_t narrow = int32_t(ids[size_t(i)]);
        call.id_bytes == 8 ? std::memcpy(numbers.get() + i * 8, &ids[size_t(i)], 8) : std::memcpy(numbers.get() + i * 4, &narrow, 4);
    }
    const Buffer trellis13(input, 2 * flats[0].trellis), suh13(input, 2 * flats[0].suh), svh13(input, 2 * flats[0].svh);
    const Buffer trellis2(input, 2 * flats[1].trellis), suh2(input, 2 * flats[1].suh), svh2(input, 2 * flats[1].svh);
    const Buffer bias13(input, 4 * flats[0].bias), bias2(input, 4 * flats[1].bias);
    call.x_stride = call.hidden + input.below(3);
    const int64_t rows = call.slots ? slots : call.tokens, width = width_of(call.out_dtype);
    const Buffer x(input, call.tokens ? ((call.tokens - 1) * call.x_stride + call.hidden) * width_of(call.dtype) : 0);
    call.out_stride = call.hidden + input.below(3);
    const Buffer out(input, rows ? ((rows - 1) * call.out_stride + call.hidden) * width : 0);
    if (tamed) {
        tame(x, call.dtype), tame(weights, 0), tame(bias13, 0), tame(bias2, 0);
        for (const Buffer* scales : {&suh13, &svh13, &suh2, &svh2}) tame(*scales, 1);
    }
    const auto floats = [](const Buffer& buffer) { return reinterpret_cast<const float*>(buffer.get()); };
    const bool biased = input.once_in(2);
    call.w13 = {trellis13.words(), suh13.words(), svh13.words(), biased ? floats(bias13) : nullptr,
                flats[0].trellis, flats[0].suh, flats[0].svh, flats[0].bias};
    call.w2 = {trellis2.words(), suh2.words(), svh2.words(), biased ? floats(bias2) : nullptr,
               flats[1].trellis, flats[1].suh, flats[1].svh, flats[1].bias};
    call.x = x.get(), call.ids = numbers.get(), call.weights = floats(weights), call.out = out.get();
    call.table = table.data();
    const int64_t hidden = call.hidden, out_stride = call.out_stride;
    bool allowed = true, only_row = false;
    if (refused) {
        const int64_t expert = input.below(call.experts);
        spoil(input, call, table[size_t(expert * call.projections + input.below(call.projections))], only_row);
        allowed = only_row && std::find(ids.begin(), ids.end(), expert) == ids.end();
    }
    // Rows of choices that name no expert are not written; as one with others they are not compared.
    const bool whole = !call.slots || std::all_of(ids.begin(), ids.end(), [&](int64_t id) { return id >= 0 && id < call.experts; });
    const Output output{out.get(), allowed && whole ? rows : 0, hidden * width, out_stride * width, call.out_dtype};
    // The scalar code's activations have other bits where rotations are rounded otherwise, more so behind an exponential.
    const double tolerance = call.out_dtype == 0 ? 2e-3 : call.out_dtype == 1 ? 4e-3 : 2e-2;
    repeat(MOE, "exl3_moe", allowed, output, tamed && input.once_in(16) ? tolerance : -1, [&] { return exl3_moe(&call); });
    if (allowed && !refused && call.context) {
        const int64_t before = exl3_context_bytes(call.context);
        if (exl3_moe_reserve(&call) != 0) fail("exl3_moe_reserve", before);
        const int64_t reserved = exl3_context_bytes(call.context);
        if (exl3_moe(&call) != 0 || exl3_context_bytes(call.context) != reserved) fail("more memory than reserved", reserved);
    }
}

}  // namespace abi

// Calls of exl3_gather_rows.
#include "abi_repeat.h"

namespace abi {
namespace {

int64_t up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple; }

// One field of a row call that no table has.
void spoil(Input& input, exl3_row_call& call) {
    static const int64_t none[] = {0, -1, INT64_MIN};
    const int64_t nothing = input.any(none);
    switch (input.below(5)) {
        case 0: call.width = nothing; break;
        case 1: call.groups = nothing; break;
        case 2: call.count = -1; break;
        case 3: call.kind = nothing ? int32_t(-1) : 4; break;
        default:
            if (call.kind == 3) {
                call.first_row = nothing ? nothing : INT64_MAX;
            } else if (call.kind < 2 && input.once_in(2)) {
                call.groups++;
            } else {
                call.index = call.ids;
            }
    }
}

// An id or a place that is in no table.
void spoil_id(Input& input, std::vector<int64_t>& wrong) {
    static const int64_t bad[] = {-1, INT64_MIN, INT64_MAX, 4, int64_t(1) << 32};
    wrong[size_t(input.below(int64_t(wrong.size())))] = input.any(bad);
}

bool inside(const std::vector<int64_t>& numbers, int64_t end) {
    return std::all_of(numbers.begin(), numbers.end(), [&](int64_t at) { return at >= 0 && at < end; });
}

}  // namespace

void call_gather(Input& input) {
    exl3_row_call call{};
    call.kind = int32_t(input.below(4));
    call.bits = int32_t(1 + input.below(8));
    call.dtype = any_dtype(input);
    call.scale_dtype = any_dtype(input);
    call.threads = any_threads(input);
    call.rows = 1 + input.below(4);
    call.count = input.below(7);
    call.width = call.kind == 3 ? 160 : 1 + input.below(input.once_in(4) ? 600 : 48);
    call.groups = call.kind == 0 ? 1 : call.kind == 1 ? up(call.width, 128) : call.kind == 2 ? up(call.width, 256) : 1;
    if (call.kind == 3) call.groups += input.below(3);
    call.first_row = call.kind == 3 ? input.below(1000) : 0;
    const bool rings = call.kind > 1, indexed = call.kind == 3 && input.once_in(2);
    const int64_t row_bytes = call.kind == 0   ? call.width
                              : call.kind == 1 ? up(call.width, 2)
                              : call.kind == 2 ? call.groups * (2 + 32 * call.bits)
                                               : 2 + 20 * call.bits;
    bool allowed = known(call.dtype) && (rings || known(call.scale_dtype));
    const int64_t ring = call.kind == 2 ? 256 : 160;
    const int64_t scales_bytes = rings ? call.groups * ring * 2 : call.rows * call.groups * width_of(call.scale_dtype);
    const Buffer table(input, call.rows * row_bytes), scales(input, scales_bytes);
    const int64_t row_width = call.width * width_of(call.dtype), count = call.count;
    std::vector<int64_t> ids(static_cast<size_t>(count)), places = ids, offsets(static_cast<size_t>(call.groups));
    ids.reserve(1);  // an address, of none too
    for (int64_t& id : ids) id = input.below(call.rows);
    for (int64_t& place : places) place = input.below(call.rows);
    int64_t offset = 0;
    for (int64_t& first : offsets) first = offset += input.below(500);
    call.ids = ids.data();
    const bool spoilt = count > 0 && input.once_in(8);
    if (spoilt) spoil_id(input, indexed && input.once_in(2) ? places : ids);
    // Where an index says which rows to read, ids are of the whole table, of which these rows are a part.
    allowed = allowed && (indexed ? inside(places, call.rows) && inside(ids, INT64_MAX / 2) : inside(ids, call.rows));
    if (indexed) call.index = places.data();
    if (!spoilt && input.once_in(8)) {
        spoil(input, call);
        allowed = false;
    }
    const Buffer out(input, count * row_width);
    call.table = table.get(), call.scales = scales.get(), call.offsets = offsets.data(), call.out = out.get();
    const Output output{out.get(), count, row_width, row_width, call.dtype};
    repeat(GATHER, "exl3_gather_rows", allowed, output, input.once_in(64) ? 0 : -1, [&] { return exl3_gather_rows(&call); });
}

}  // namespace abi

// Calls of exl3_linear, exl3_dequantize, exl3_hadamard and exl3_encode.
#include <climits>

#include "abi_repeat.h"

namespace abi {
namespace {

constexpr int64_t HUGE_SIZES[] = {-1, 0, 1, 127, -128, 1 << 20, int64_t(1) << 32, (int64_t(1) << 32) + 4,
                                  int64_t(1) << 62, INT64_MAX, INT64_MIN};

bool valid(const exl3_shard& s) {
    const bool sizes = s.in_features > 0 && s.in_features % 128 == 0 && s.out_features > 0 && s.out_features % 128 == 0;
    const bool crop = s.crop_start >= 0 && s.crop_size >= 0 && s.crop_start <= s.out_features &&
                      s.crop_size <= s.out_features - s.crop_start;
    const bool whole = s.half_bits % 2 == 0 && s.half_bits >= 2 && s.half_bits <= 16 && s.codebook >= 0 && s.codebook <= 2;
    const bool half = s.half_bits % 2 != 0 && s.half_bits >= 3 && s.half_bits <= 7 && s.codebook == 2;
    return sizes && crop && (whole || half);
}

exl3_shard any_shard(Input& input) {
    exl3_shard s{};
    s.codebook = input.below(3);
    s.half_bits = 2 * (1 + input.below(8));
    if (s.codebook == 2 && input.once_in(3)) s.half_bits = 3 + 2 * input.below(3);
    s.in_features = 128 * (1 + input.once_in(8));
    s.out_features = 128 * (1 + input.once_in(8));
    s.crop_start = input.once_in(2) ? input.below(s.out_features + 1) : 0;
    s.crop_size = s.out_features - s.crop_start;
    if (input.once_in(2)) s.crop_size = input.below(s.crop_size + 1);
    return s;
}

// The shards of a call; now and then one field of one of them is of no layer, or there are none.
std::vector<exl3_shard> any_shards(Input& input, bool equal_inputs, bool refused) {
    std::vector<exl3_shard> found(size_t(1 + input.once_in(8)));
    for (exl3_shard& s : found) s = any_shard(input);
    if (equal_inputs && !input.once_in(16)) found.back().in_features = found.front().in_features;
    if (refused) {
        exl3_shard& s = found[size_t(input.below(int64_t(found.size())))];
        int64_t* fields[] = {&s.half_bits, &s.codebook, &s.in_features, &s.out_features, &s.crop_start, &s.crop_size};
        *fields[input.below(6)] = input.any(HUGE_SIZES);
    }
    return found;
}

struct Sizes {
    bool valid = true, large = false, equal_inputs = true;
    int64_t trellis = 0, suh = 0, svh = 0, output = 0, narrowest = INT64_MAX;
};

Sizes sizes(const std::vector<exl3_shard>& shards) {
    Sizes found;
    for (const exl3_shard& s : shards) {
        found.valid = found.valid && valid(s);
        found.equal_inputs = found.equal_inputs && s.in_features == shards.front().in_features;
        found.large = found.large || s.in_features > 4096 || s.out_features > 4096;
        if (!found.valid || found.large) continue;
        found.trellis += s.in_features / 16 * (s.out_features / 16) * 8 * s.half_bits;
        found.suh += s.in_features;
        found.svh += s.out_features;
        found.output += s.crop_size;
        found.narrowest = std::min(found.narrowest, s.in_features);
    }
    return found;
}

// Numbers of both signs between 1/2 and 2, so that results of two instruction sets can be compared.
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

// Sums are exact in every instruction set; scales, rotations and the cast may differ in the last place, and an activation
// halfway between two of int16 then rounds the other way.
double tolerance_of(int32_t dtype) { return dtype == 0 ? 2e-4 : dtype == 1 ? 2e-3 : 1.6e-2; }

}  // namespace

void call_linear(Input& input) {
    const bool refused = input.once_in(4), tamed = !refused && input.once_in(4);
    const std::vector<exl3_shard> layout = any_shards(input, false, refused && input.once_in(2));
    const Sizes size = sizes(layout);
    if (size.valid && size.large) return;
    exl3_linear_call call{};
    call.shards = layout.data();
    call.shard_count = int32_t(layout.size());
    call.dtype = tamed ? int32_t(input.below(3)) : any_dtype(input);
    call.bias_dtype = tamed ? int32_t(input.below(3)) : any_dtype(input);
    call.threads = any_threads(input);
    call.rows = input.once_in(64) ? input.below(40) : 1 + input.below(2) - input.once_in(8);
    const bool biased = input.once_in(3);
    bool allowed = size.valid && known(call.dtype) && (!biased || known(call.bias_dtype));
    call.columns = size.valid ? (input.once_in(4) ? input.below(size.narrowest + 1) : size.narrowest) : 1;
    call.x_stride = input.once_in(8) ? 0 : call.columns + (input.once_in(4) ? input.below(8) : 0);
    if (refused && size.valid) {
        static const int64_t none[] = {0, -1, INT32_MIN};
        switch (input.below(4)) {
            case 0: call.rows = input.once_in(2) ? -1 - input.below(3) : INT64_MIN; break;
            case 1: call.columns = input.once_in(2) ? -1 - input.below(3) : INT64_MIN; break;
            case 2: call.dtype = int32_t(input.once_in(2) ? 3 + input.below(9) : -1 - input.below(9)); break;
            default: call.shard_count = int32_t(input.any(none));
        }
        allowed = false;
    }
    const bool usable = allowed && call.rows > 0;
    const Buffer trellis(input, allowed ? 2 * size.trellis : 0), suh(input, allowed ? 2 * size.suh : 0);
    const Buffer svh(input, allowed ? 2 * size.svh : 0);
    const Buffer bias(input, allowed ? size.output * width_of(call.bias_dtype) : 0);
    const int64_t width = width_of(call.dtype);
    const Buffer x(input, usable ? ((call.rows - 1) * call.x_stride + call.columns) * width : 0);
    call.y_stride = size.output + (input.once_in(4) ? input.below(9) : 0);
    const Buffer y(input, usable ? ((call.rows - 1) * call.y_stride + size.output) * width : 0);
    if (tamed) tame(x, call.dtype), tame(suh, 1), tame(svh, 1), tame(bias, call.bias_dtype);
    call.trellis = trellis.words(), call.suh = suh.words(), call.svh = svh.words();
    call.bias = biased ? bias.get() : nullptr;
    call.x = x.get(), call.y = y.get();
    const Output output{y.get(), usable ? call.rows : 0, size.output * width, call.y_stride * width, call.dtype};
    repeat(LINEAR, "exl3_linear", allowed, output, tamed && input.once_in(32) ? tolerance_of(call.dtype) : -1,
           [&] { return exl3_linear(&call); });
}

void call_dequantize(Input& input) {
    const bool refused = input.once_in(2), tamed = !refused && input.once_in(4);
    const std::vector<exl3_shard> layout = any_shards(input, !refused || input.once_in(2), refused && input.once_in(2));
    const Sizes size = sizes(layout);
    if (size.valid && size.large) return;
    const int32_t dtype = tamed ? int32_t(input.below(3)) : any_dtype(input);
    const bool none = refused && input.once_in(4);
    const bool allowed = size.valid && size.equal_inputs && known(dtype) && !none;
    const Buffer trellis(input, allowed ? 2 * size.trellis : 0), suh(input, allowed ? 2 * size.suh : 0);
    const Buffer svh(input, allowed ? 2 * size.svh : 0);
    const int64_t stride = size.output + (input.once_in(4) ? input.below(9) : 0), width = width_of(dtype);
    const int64_t rows = allowed ? size.narrowest : 0;
    const Buffer out(input, allowed ? ((rows - 1) * stride + size.output) * width : 0);
    if (tamed) tame(suh, 1), tame(svh, 1);
    const int rotated = int(input.below(2)), workers = any_threads(input);
    const int count = none ? -int(input.below(2)) : int(layout.size());
    repeat(DEQUANTIZE, "exl3_dequantize", allowed, {out.get(), rows, size.output * width, stride * width, dtype},
           tamed && input.once_in(8) ? tolerance_of(dtype) : -1, [&] {
               return exl3_dequantize(layout.data(), count, trellis.words(), suh.words(), svh.words(), rotated, dtype,
                                      out.get(), stride, workers);
           });
}

void call_hadamard(Input& input) {
    const bool refused = input.once_in(8);
    const int64_t blocks = refused ? (input.once_in(4) ? INT64_MIN : -1 - input.below(3)) : input.below(4);
    const int64_t count = std::max<int64_t>(blocks, 0);
    Buffer values(input, count * 512);
    const std::vector<uint8_t> before(values.get(), values.get() + values.size());
    // In place: the rotation of the same numbers is what is repeated.
    repeat(HADAMARD, "exl3_hadamard", !refused, {values.get(), count, 512, 512, 0}, -1, [&] {
        if (count) std::memcpy(values.get(), before.data(), before.size());
        return exl3_hadamard(reinterpret_cast<float*>(values.get()), blocks, any_threads(input));
    });
}

void call_encode(Input& input, bool search) {
    exl3_shard s = any_shard(input);
    if (!search) {  // a shape or a rate that is none
        static const int64_t rates[] = {0, 1, 17, 18, -8, INT_MAX, INT_MIN};
        s.crop_start = s.crop_size = 0;
        switch (input.below(4)) {
            case 0: s.half_bits = input.any(rates); break;
            case 1: s.codebook = input.once_in(2) ? 3 : -1; break;
            case 2: s.in_features = input.any(HUGE_SIZES); break;
            default: s.out_features = input.any(HUGE_SIZES);
        }
        if (valid(s)) return;
        const Output nothing{nullptr, 0, 0, 0, 1};
        repeat(ENCODE, "exl3_encode", false, nothing, -1, [&] {
            return exl3_encode(nullptr, s.out_features, s.in_features, s.out_features, int(s.half_bits), int(s.codebook),
                               nullptr, nullptr, any_threads(input));
        });
        return;
    }
    const int64_t columns = 128, stride = columns + input.below(3);
    const Buffer weights(input, ((128 - 1) * stride + columns) * 4);
    if (input.once_in(2)) tame(weights, 0);
    const int64_t bytes = 8 * 8 * 16 * s.half_bits;
    const Buffer trellis(input, bytes);
    double error = 0;
    repeat(ENCODE, "exl3_encode", true, {trellis.get(), 1, bytes, bytes, 1}, -1, [&] {
        return exl3_encode(reinterpret_cast<const float*>(weights.get()), stride, 128, columns, int(s.half_bits),
                           int(s.codebook), reinterpret_cast<uint16_t*>(trellis.get()), &error, 1);
    });
}

}  // namespace abi

// Calls the C interface of the CPU library (csrc/cpu/abi.h) with arguments that the fuzzer's bytes decide. Every buffer
// is as large as the interface says and no larger, so that AddressSanitizer sees each byte beyond. A call that the
// interface allows must return 0 and give equal bits whatever lay in the output before; another must return a code.
//
// Links with libFuzzer, or with abi_random.cpp where there is no clang.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "../../csrc/cpu/abi.h"

namespace {

constexpr int64_t HUGE_SIZES[] = {-1, 0, 1, 127, -128, 1 << 20, int64_t(1) << 32, (int64_t(1) << 32) + 4,
                                  int64_t(1) << 62, INT64_MAX, INT64_MIN};

// Calls of functions that compute, for the campaign's record.
struct Counter {
    int64_t calls = 0;
    ~Counter() { std::printf("CALLS %lld\n", static_cast<long long>(calls)); }
} counter;

[[noreturn]] void fail(const char* what, int64_t found) {
    std::fprintf(stderr, "FOUND: %s (%lld)\n", what, static_cast<long long>(found));
    std::abort();
}

// The fuzzer's bytes as numbers; zeros once they are used up.
class Input {
   public:
    Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

    int64_t below(int64_t count) {
        const int64_t high = next();
        return (high << 8 | next()) % count;
    }
    bool once_in(int64_t count) { return below(count) == count - 1; }
    template <size_t N>
    int64_t any(const int64_t (&values)[N]) {
        return values[below(N)];
    }
    // A buffer of exactly `bytes`: the rest of the input over and over, or words that it decides.
    std::unique_ptr<uint8_t[]> fill(int64_t bytes) {
        std::unique_ptr<uint8_t[]> buffer(new uint8_t[size_t(bytes)]);
        const uint64_t kind = uint64_t(next());
        const size_t size = size_t(bytes), left = size_ - at_;
        if (kind % 4 == 0) {
            const size_t own = std::min(left, size);
            std::fill_n(buffer.get(), size, uint8_t(0));
            if (own) std::copy_n(data_ + at_, own, buffer.get());
            for (size_t done = own; own && done < size; done *= 2)
                std::copy_n(buffer.get(), std::min(done, size - done), buffer.get() + done);
            return buffer;
        }
        uint64_t state = (kind << 32 | left) * 0x9E3779B97F4A7C15u + 1;
        for (size_t i = 0; i < size; i += 8) {
            state ^= state << 13, state ^= state >> 7, state ^= state << 17;
            std::memcpy(buffer.get() + i, &state, std::min<size_t>(8, size - i));
        }
        return buffer;
    }

   private:
    int next() { return at_ < size_ ? data_[at_++] : 0; }

    const uint8_t* data_;
    size_t size_, at_ = 0;
};

bool valid(const exl3_shard& s) {
    const bool sizes = s.in_features > 0 && s.in_features % 128 == 0 && s.out_features > 0 && s.out_features % 128 == 0;
    const bool crop = s.crop_start >= 0 && s.crop_size >= 0 && s.crop_start <= s.out_features &&
                      s.crop_size <= s.out_features - s.crop_start;
    const bool whole = s.half_bits % 2 == 0 && s.half_bits >= 2 && s.half_bits <= 16 && s.codebook >= 0 && s.codebook <= 2;
    const bool half = s.half_bits % 2 != 0 && s.half_bits >= 3 && s.half_bits <= 7 && s.codebook == 2;
    return sizes && crop && (whole || half);
}

exl3_shard shard(Input& input) {
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

// The shards of a call; now and then one field of one of them is of no layer.
std::vector<exl3_shard> shards(Input& input, bool equal_inputs) {
    std::vector<exl3_shard> found(size_t(1 + input.once_in(8)));
    for (exl3_shard& s : found) s = shard(input);
    if (equal_inputs && !input.once_in(16)) found.back().in_features = found.front().in_features;
    if (input.once_in(16)) {
        int64_t* fields[] = {&found.back().half_bits,    &found.back().codebook,   &found.back().in_features,
                             &found.back().out_features, &found.back().crop_start, &found.back().crop_size};
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

int64_t width_of(int64_t dtype) { return dtype == 0 ? 4 : 2; }

// 0, 1 or 2; now and then none of them.
int32_t dtype(Input& input) { return int32_t(input.once_in(32) ? input.below(7) - 3 : input.below(3)); }
bool known(int64_t dtype) { return dtype >= 0 && dtype <= 2; }

int32_t threads(Input& input) {
    static const int64_t odd[] = {0, -1, 2, 3, INT32_MIN};
    return int32_t(input.once_in(4096) ? input.any(odd) : 1);
}

// Calls twice over different garbage: equal bits mean that all of the output was written, from what was given alone.
template <class Call>
void repeat(const char* name, bool allowed, std::unique_ptr<uint8_t[]>& out, int64_t bytes, Call&& call) {
    counter.calls++;
    const auto spoil = [&](int value) {
        if (bytes) std::memset(out.get(), value, size_t(bytes));
    };
    spoil(0xA5);
    const int code = call();
    if (allowed != (code == 0)) fail(name, code);
    if (code && !std::strcmp(exl3_error_text(code), "unknown error")) fail("a code without a text", code);
    if (code) return;
    const std::vector<uint8_t> first(out.get(), out.get() + bytes);
    counter.calls++;
    spoil(0x3C);
    if (call() != 0) fail("the second call", -1);
    if (!std::equal(first.begin(), first.end(), out.get())) fail(name, -1);
}

void linear(Input& input) {
    const std::vector<exl3_shard> layout = shards(input, false);
    const Sizes size = sizes(layout);
    exl3_linear_call call{};
    call.shards = layout.data();
    call.shard_count = int32_t(layout.size());
    call.dtype = dtype(input);
    call.bias_dtype = dtype(input);
    call.threads = threads(input);
    call.rows = input.once_in(64) ? input.below(40) : 1 + input.below(2) - input.once_in(8);
    const bool biased = input.once_in(3);
    bool allowed = size.valid && known(call.dtype) && (!biased || known(call.bias_dtype));
    if (size.valid && size.large) return;
    call.columns = size.valid ? (input.once_in(4) ? input.below(size.narrowest + 1) : size.narrowest) : 1;
    call.x_stride = input.once_in(8) ? 0 : call.columns + (input.once_in(4) ? input.below(8) : 0);
    if (input.once_in(64)) {
        (input.once_in(2) ? call.rows : call.columns) = -1 - input.below(3);
        allowed = false;
    }
    const bool usable = allowed && call.rows > 0;
    const auto trellis = input.fill(allowed ? 2 * size.trellis : 0), suh = input.fill(allowed ? 2 * size.suh : 0);
    const auto svh = input.fill(allowed ? 2 * size.svh : 0);
    const auto bias = input.fill(allowed ? size.output * width_of(call.bias_dtype) : 0);
    const auto x = input.fill(usable ? ((call.rows - 1) * call.x_stride + call.columns) * width_of(call.dtype) : 0);
    call.y_stride = size.output;
    const int64_t bytes = usable ? call.rows * size.output * width_of(call.dtype) : 0;
    auto y = input.fill(bytes);
    call.trellis = reinterpret_cast<const uint16_t*>(trellis.get());
    call.suh = reinterpret_cast<const uint16_t*>(suh.get());
    call.svh = reinterpret_cast<const uint16_t*>(svh.get());
    call.bias = biased ? bias.get() : nullptr;
    call.x = x.get();
    call.y = y.get();
    repeat("exl3_linear", allowed, y, bytes, [&] { return exl3_linear(&call); });
}

void dequantize(Input& input) {
    const std::vector<exl3_shard> layout = shards(input, true);
    const Sizes size = sizes(layout);
    if (size.valid && size.large) return;
    const int32_t type = dtype(input);
    const bool allowed = size.valid && size.equal_inputs && known(type);
    const auto trellis = input.fill(allowed ? 2 * size.trellis : 0), suh = input.fill(allowed ? 2 * size.suh : 0);
    const auto svh = input.fill(allowed ? 2 * size.svh : 0);
    const int64_t bytes = allowed ? size.narrowest * size.output * width_of(type) : 0;
    auto out = input.fill(bytes);
    const int rotated = int(input.below(2)), workers = threads(input);
    repeat("exl3_dequantize", allowed, out, bytes, [&] {
        return exl3_dequantize(layout.data(), int(layout.size()), reinterpret_cast<const uint16_t*>(trellis.get()),
                               reinterpret_cast<const uint16_t*>(suh.get()),
                               reinterpret_cast<const uint16_t*>(svh.get()), rotated, type, out.get(), size.output,
                               workers);
    });
}

void hadamard(Input& input) {
    const int64_t blocks = input.once_in(64) ? -1 - input.below(3) : input.below(6);
    const auto values = input.fill(blocks > 0 ? blocks * 512 : 0);
    counter.calls++;
    const int code = exl3_hadamard(reinterpret_cast<float*>(values.get()), blocks, threads(input));
    if ((code == 0) != (blocks >= 0)) fail("exl3_hadamard", code);
}

void encode(Input& input) {
    const exl3_shard s = shard(input);
    const int64_t columns = 128, stride = columns + input.below(3);
    const auto weights = input.fill(((128 - 1) * stride + columns) * 4);
    const int64_t bytes = 8 * 8 * 16 * s.half_bits;
    auto trellis = input.fill(bytes);
    double error = 0;
    repeat("exl3_encode", true, trellis, bytes, [&] {
        return exl3_encode(reinterpret_cast<const float*>(weights.get()), stride, 128, columns, int(s.half_bits),
                           int(s.codebook), reinterpret_cast<uint16_t*>(trellis.get()), &error, 1);
    });
}

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

void gather(Input& input) {
    exl3_row_call call{};
    call.kind = int32_t(input.below(4));
    call.bits = int32_t(1 + input.below(8));
    call.dtype = dtype(input);
    call.scale_dtype = dtype(input);
    call.threads = threads(input);
    call.rows = 1 + input.below(4);
    call.count = input.below(7);
    call.width = call.kind == 3 ? 160 : 1 + input.below(600);
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
    const auto table = input.fill(call.rows * row_bytes), scales = input.fill(scales_bytes);
    const auto out_bytes = call.count * call.width * width_of(call.dtype);
    std::vector<int64_t> ids(static_cast<size_t>(call.count)), places = ids, offsets(static_cast<size_t>(call.groups));
    ids.reserve(1);  // an address, of none too
    for (int64_t& id : ids) id = input.below(call.rows);
    for (int64_t& place : places) place = input.below(call.rows);
    int64_t offset = 0;
    for (int64_t& first : offsets) first = offset += input.below(500);
    call.ids = ids.data();
    const bool spoilt = call.count > 0 && input.once_in(16);
    if (spoilt) {
        auto& wrong = indexed && input.once_in(2) ? places : ids;
        static const int64_t bad[] = {-1, INT64_MIN, INT64_MAX, 4, int64_t(1) << 32};
        wrong[size_t(input.below(call.count))] = input.any(bad);
    }
    const auto inside = [&](const std::vector<int64_t>& numbers) {
        return std::all_of(numbers.begin(), numbers.end(), [&](int64_t at) { return at >= 0 && at < call.rows; });
    };
    // Where an index says which rows to read, ids are of the whole table, of which these rows are a part.
    const bool representable = std::all_of(ids.begin(), ids.end(), [](int64_t id) { return id >= 0 && id < INT64_MAX / 2; });
    allowed = allowed && (indexed ? inside(places) && representable : inside(ids));
    if (indexed) call.index = places.data();
    if (!spoilt && input.once_in(16)) {
        spoil(input, call);
        allowed = false;
    }
    auto out = input.fill(out_bytes);
    call.table = table.get();
    call.scales = scales.get();
    call.offsets = offsets.data();
    call.out = out.get();
    repeat("exl3_gather_rows", allowed, out, allowed ? out_bytes : 0, [&] { return exl3_gather_rows(&call); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const char* const sets[] = {"auto", "scalar", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_vbmi"};
    Input input(data, size);
    // One after the other wherever this processor has them; what it has not is refused and changes nothing.
    // The portable kernels take twenty times as long under sanitizers.
    exl3_select_isa(input.once_in(16) ? sets[1] : sets[(2 + input.below(6)) % 7]);
    // An encoder's call takes as long as ten thousand others: a hash of the input lets few in.
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < size; i++) hash = (hash ^ data[i]) * 16777619u;
    if ((hash >> 8) % 40000 == 0) {
        if (!std::strcmp(exl3_isa(), "scalar")) exl3_select_isa("auto");  // a minute of it otherwise
        encode(input);
        return 0;
    }
    const int64_t choice = input.below(64);
    if (choice < 1) {
        dequantize(input);
    } else if (choice < 8) {
        hadamard(input);
    } else if (choice < 36) {
        gather(input);
    } else {
        linear(input);
    }
    return 0;
}

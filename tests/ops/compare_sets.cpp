// Runs the CPU library's best instruction set beside its scalar code, where Python is not to be had: compiled for another
// architecture and run under emulation by test_aarch64.py. Prints what differs; the exit status is how many did.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "../../csrc/cpu/abi.h"

namespace {

std::mt19937 random_bits(1);
int failures = 0;

void expect(bool good, const char* what, int half_bits, int codebook, int64_t count) {
    if (good) return;
    failures++;
    std::printf("%s: K = %g, codebook %d, %d rows differ\n", what, half_bits / 2.0, codebook, int(count));
}

template <class T>
std::vector<T> random_words(size_t count) {
    std::vector<T> words(count);
    for (T& word : words) word = T(random_bits());
    return words;
}

// fp16 numbers of both signs, from 0.5 to 2.
std::vector<uint16_t> random_halves(size_t count) {
    std::vector<uint16_t> halves = random_words<uint16_t>(count);
    for (uint16_t& half : halves) half = uint16_t((half & 0x83ff) | (0x3800 + (half & 0x0400)));
    return halves;
}

std::vector<float> random_floats(size_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = normal(random_bits);
    return values;
}

template <class Run>
auto under(const char* isa, Run&& run) {
    if (exl3_select_isa(isa)) std::exit(100);
    return run();
}

double relative_error(const std::vector<float>& found, const std::vector<float>& expected) {
    double error = 0, size = 0;
    for (size_t i = 0; i < found.size(); i++) {
        error += std::pow(double(found[i]) - double(expected[i]), 2);
        size += std::pow(double(expected[i]), 2);
    }
    return std::sqrt(error / size);
}

void linears(int half_bits, int codebook) {
    const int64_t in = 256, out = 384;
    const exl3_shard shard{half_bits, codebook, in, out, 0, out};
    const auto trellis = random_words<uint16_t>(size_t(in / 16 * (out / 16) * 8 * half_bits));
    const auto suh = random_halves(size_t(in)), svh = random_halves(size_t(out));
    for (const int64_t rows : {1, 2, 3, 9, 40}) {
        const auto x = random_floats(size_t(rows * in));
        const auto run = [&] {
            std::vector<float> y(size_t(rows * out));
            const exl3_linear_call call{&shard, trellis.data(), suh.data(), svh.data(), nullptr, x.data(), y.data(),
                                        rows,   in,             in,         out,        1,       0,        0, 1};
            if (exl3_linear(&call)) std::exit(101);
            return y;
        };
        const auto found = under("auto", run), expected = under("scalar", run);
        // Sums are exact; scales and the rotations' roundings may differ in the last place.
        expect(relative_error(found, expected) < 2e-5, "linear", half_bits, codebook, rows);
    }
}

void encoder(int half_bits, int codebook) {
    auto weights = random_floats(128 * 128);
    for (int i = 0; i < 128 * 128; i++) {
        if (i % 128 < 16) weights[size_t(i)] = 0;         // ties
        else if (i % 128 < 32) weights[size_t(i)] *= 10;  // beyond the codebook
    }
    const auto run = [&] {
        std::vector<uint16_t> trellis(size_t(8 * 8 * 8 * half_bits));
        double error;
        if (exl3_encode(weights.data(), 128, 128, 128, half_bits, codebook, trellis.data(), &error, 1)) std::exit(102);
        return trellis;
    };
    expect(under("auto", run) == under("scalar", run), "encode", half_bits, codebook, 128);
}

void tables(int bits) {
    const int64_t count = 5, rows = 40;
    for (const int dtype : {0, 1, 2}) {
        for (int kind = 0; kind < 4; kind++) {
            const int64_t width = kind == 3 ? 160 : 512, groups = kind == 3 ? 2 : kind == 2 ? 2 : width / 128;
            auto table = random_words<uint8_t>(size_t(rows * 2 * (width * 8 / 8 + 64)));
            // Rings begin with their scale, a fp16 number.
            const size_t ring = kind == 3 ? size_t(160 * bits / 16 + 1) : size_t(256 * bits / 16 + 1);
            if (kind >= 2) {
                for (size_t at = 0; at + 1 < table.size(); at += 2 * ring) {
                    const uint16_t scale = random_halves(1)[0];
                    std::memcpy(&table[at], &scale, sizeof scale);
                }
            }
            const auto scales = random_halves(size_t(rows * 4 + 512 * 2));
            const auto run = [&] {
                const std::vector<int64_t> ids{3, 0, 39, 7, 3}, offsets{0, 20};
                std::vector<uint8_t> out(size_t(count * width * 4));
                exl3_row_call call{};
                call.table = table.data(), call.scales = scales.data(), call.ids = ids.data();
                call.offsets = offsets.data(), call.out = out.data(), call.count = count, call.rows = rows;
                call.width = width, call.groups = groups, call.kind = kind, call.bits = bits;
                call.scale_dtype = 1, call.dtype = dtype, call.threads = 1;
                if (const int code = exl3_gather_rows(&call)) std::printf("%s\n", exl3_error_text(code)), std::exit(103);
                return out;
            };
            expect(under("auto", run) == under("scalar", run), "rows", 2 * bits, kind, count);
        }
    }
}

}  // namespace

int main() {
    exl3_select_isa("auto");
    std::printf("%s\n", exl3_isa());
    const bool known = std::strcmp(exl3_isa(), "scalar") != 0;
    if (!known) std::printf("there is nothing to compare scalar code with\n");
    for (int codebook = 0; codebook < 3; codebook++) {
        for (int half_bits = 2; half_bits <= 16; half_bits++) {
            if (half_bits % 2 && (codebook != 2 || half_bits > 7)) continue;
            linears(half_bits, codebook);
            if (codebook == 2) encoder(half_bits, codebook);
        }
    }
    for (int bits = 1; bits <= 8; bits++) tables(bits);
    std::printf("%d differences\n", failures);
    return known ? failures : 104;
}

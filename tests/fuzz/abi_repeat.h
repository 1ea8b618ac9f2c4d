// A call made twice over different garbage, and for a sample once more by the portable kernels.
#pragma once

#include <cmath>
#include <vector>

#include "abi_input.h"

namespace abi {

// Where a call writes: rows of `width` bytes, `stride` apart. What lies between them is nobody's.
struct Output {
    uint8_t* at;
    int64_t rows, width, stride;
    int32_t dtype;

    void spoil(int value) const {
        if (rows > 0 && at) std::memset(at, value, size_t((rows - 1) * stride + width));
    }
    // The rows' bytes; ends the process where a byte between rows is not as `spoil` left it.
    std::vector<uint8_t> read(const char* name, int value) const {
        std::vector<uint8_t> found;
        found.reserve(size_t(rows * width));
        for (int64_t row = 0; row < rows; row++) {
            const uint8_t* begin = at + row * stride;
            found.insert(found.end(), begin, begin + width);
            for (int64_t i = width; row + 1 < rows && i < stride; i++)
                if (begin[i] != value) fail(name, -2);
        }
        return found;
    }
};

inline float number(const uint8_t* at, int32_t dtype) {
    uint32_t bits = 0;
    float value;
    if (dtype == 0) {
        std::memcpy(&value, at, 4);
        return value;
    }
    std::memcpy(&bits, at, 2);
    if (dtype == 1) {
        const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
        value = exponent == 31 ? (mantissa ? NAN : INFINITY)
                               : float(std::ldexp(exponent ? mantissa + 1024 : mantissa, (exponent ? exponent : 1) - 25));
        return bits & 0x8000 ? -value : value;
    }
    bits <<= 16;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Whether two outputs agree: numbers that are none at the same places, and of the others the relative error of all together.
// Results that cancel to less than a hundredth of the usual are as inexact as these.
inline bool agree(const std::vector<uint8_t>& one, const std::vector<uint8_t>& other, int32_t dtype, double tolerance) {
    double error = 0, size = 0;
    for (size_t i = 0; i < one.size(); i += size_t(width_of(dtype))) {
        const double a = number(&one[i], dtype), b = number(&other[i], dtype);
        if (std::isnan(a) != std::isnan(b)) return false;
        if (std::isnan(a) || (std::isinf(a) && a == b)) continue;
        error += (a - b) * (a - b), size += b * b + 0.01;
    }
    return error <= tolerance * tolerance * size;
}

// Expects a call to be refused, or to compute the same bits whatever lay in the output before. With a tolerance of 0 or
// more the scalar instruction set is to agree.
template <class Call>
void repeat(Function function, const char* name, bool allowed, const Output& output, double tolerance, Call&& call) {
    output.spoil(0xA5);
    const int code = call();
    (code ? record.refused : record.computed)[function]++;
    if (allowed != (code == 0)) fail(name, code);
    if (code && !std::strcmp(exl3_error_text(code), "unknown error")) fail("a code without a text", code);
    if (code) return;
    const std::vector<uint8_t> first = output.read(name, 0xA5);
    output.spoil(0x3C);
    record.computed[function]++;
    if (call() != 0) fail("the second call", -1);
    if (first != output.read(name, 0x3C)) fail(name, -1);
    const char* const chosen = exl3_isa();
    if (tolerance < 0 || !std::strcmp(chosen, "scalar")) return;
    exl3_select_isa("scalar");
    output.spoil(0x5A);
    const int scalar = call();
    record.computed[function]++, record.compared[function]++;
    exl3_select_isa(chosen);
    if (scalar != 0 || !agree(first, output.read(name, 0x5A), output.dtype, tolerance)) fail("scalar code differs", function);
}

}  // namespace abi

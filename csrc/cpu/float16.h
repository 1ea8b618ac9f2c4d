// Scalar conversions between float32 and the 16-bit storage types, rounding to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

inline uint32_t float_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float bits_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16;
    const uint32_t magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00) return bits_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    // Scaling by 2^112 rebiases the exponent and normalises subnormals in one exact step.
    return bits_float(sign | float_bits(bits_float(magnitude << 13) * 0x1p112f));
}

inline uint16_t float_to_half(float value) {
    const uint32_t bits = float_bits(value);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (magnitude < 0x38800000) {
        // Adding 0.5 leaves the subnormal's bits, rounded by the addition, at the mantissa's end.
        return uint16_t(sign | (float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000));
    }
    const uint32_t odd = magnitude >> 13 & 1;
    return uint16_t(sign | (magnitude - 0x38000000 + 0xfff + odd) >> 13);
}

inline float bfloat_to_float(uint16_t value) { return bits_float(uint32_t(value) << 16); }

inline uint16_t float_to_bfloat(float value) {
    // Both results are computed, so that loops over this become vector code.
    const uint32_t bits = float_bits(value), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
}

}  // namespace

// wgmma of two operands in shared memory on the host; see base/wgmma.cuh beside it.
#pragma once
#include "base/wgmma.cuh"

inline float operand_at(u64 descriptor, int row, int k) {
    const u32 address = (descriptor & 0x3fff) * 16, k_step = (descriptor >> 16 & 0x3fff) * 16, groups = (descriptor >> 32 & 0x3fff) * 16;
    uint16_t bits;
    memcpy(&bits, shared_bytes(address + row / 8 * groups + k / 8 * k_step + row % 8 * 16 + k % 8 * 2, 2), 2);
    return half_value(bits);
}
inline void multiply_shared(float (&d)[32], u64 a, u64 b) {
    const int lane = running % 32, first = running / 32 % 4 * 16 + lane / 4;
    for (int j = 0; j < 32; ++j)
        for (int k = 0; k < 16; ++k) d[j] += operand_at(a, first + 8 * (j % 4 / 2), k) * operand_at(b, j / 4 * 8 + lane % 4 * 2 + j % 2, k);
}
inline void fence_proxy_async() {}

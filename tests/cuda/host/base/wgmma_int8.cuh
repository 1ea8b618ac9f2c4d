// wgmma on bytes on the host, warp by warp and at once; see base/wgmma.cuh beside it.
#pragma once
#include "base/wgmma.cuh"

template <int N>
struct WarpgroupByteMma {
    static void run(int (&d)[N / 2], const u32 (&a)[4], u64 b) {
        MmaOperands(&lanes)[32] = mma_operands[running / 32];
        const int lane = running % 32, g = lane / 4, q = lane % 4;
        for (int i = 0; i < 4; ++i) lanes[lane].a[i] = a[i];
        __syncwarp();
        const u32 address = (b & 0x3fff) * 16, k_step = (b >> 16 & 0x3fff) * 16, groups = (b >> 32 & 0x3fff) * 16;
        for (int j = 0; j < N / 2; ++j) {
            const int row = g + 8 * (j % 4 / 2), column = 2 * q + j % 2;
            for (int k = 0; k < 32; ++k) {
                const u8 bits = *shared_bytes(address + j / 4 * groups + k / 16 * k_step + column * 16 + k % 16, 1);
                d[j] += int(int8_t(lanes[row % 8 * 4 + k % 16 / 4].a[row / 8 + 2 * (k / 16)] >> 8 * (k % 4))) * int(int8_t(bits));
            }
        }
        __syncwarp();
    }
};

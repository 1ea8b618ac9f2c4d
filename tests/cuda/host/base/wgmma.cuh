// wgmma on the host, warp by warp and at once: what is still in flight on a GPU is finished here.
#pragma once
#include "base/types.cuh"

inline void warpgroup_fence() {}
inline void warpgroup_commit() {}
inline void warpgroup_wait() {}
inline void ptx_wgmma_wait_group_sync_aligned(int = 0) {}

template <int N>
struct WarpgroupMma {
    template <bool ACCUMULATE = true>
    static void run(float (&d)[N / 2], const u32 (&a)[4], u64 b) {
        if (!ACCUMULATE) std::fill(d, d + N / 2, 0.0f);
        MmaOperands(&lanes)[32] = mma_operands[running / 32];
        const int lane = running % 32, g = lane / 4, q = lane % 4;
        for (int i = 0; i < 4; ++i) lanes[lane].a[i] = a[i];
        __syncwarp();
        // Addresses and offsets in 16 bytes: of the matrices of one k step, and of groups of 8 columns.
        const u32 address = (b & 0x3fff) * 16, k_step = (b >> 16 & 0x3fff) * 16, groups = (b >> 32 & 0x3fff) * 16;
        for (int j = 0; j < N / 2; ++j) {
            const int row = g + 8 * (j % 4 / 2), column = 2 * q + j % 2;
            for (int k = 0; k < 16; ++k) {
                uint16_t bits;
                memcpy(&bits, shared_bytes(address + j / 4 * groups + k / 8 * k_step + column * 16 + k % 8 * 2, 2), 2);
                // Columns without a row hold anything; on a GPU they stay in columns that nobody reads.
                d[j] += half_value(lanes[row % 8 * 4 + k % 8 / 2].a[row / 8 + 2 * (k / 8)] >> 16 * (k % 2)) * half_value(bits);
            }
        }
        __syncwarp();
    }
};

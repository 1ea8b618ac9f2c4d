// Tiles of AMX: 16 rows of 64 bytes, multiplied as int8 into int32.
//
// Written as assembly because GCC 12's intrinsics do not say that they read and write memory, so that the compiler moves
// stores across them.
#pragma once

#include <cstdint>

namespace {

constexpr int AMX_ROWS = 16, AMX_BYTES = 64;
constexpr int AMX_TILE = AMX_ROWS * AMX_BYTES;

// All eight tiles have 64 bytes a row; ROWS of them in the first FEW, and 16 in the others.
class TileShapes {
   public:
    TileShapes(int few, int rows) {
        alignas(64) uint8_t config[64] = {1};  // palette
        for (int tile = 0; tile < 8; tile++) {
            const uint16_t bytes = AMX_BYTES;
            __builtin_memcpy(config + 16 + 2 * tile, &bytes, sizeof bytes);
            config[48 + tile] = uint8_t(tile < few ? rows : AMX_ROWS);
        }
        asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
    }
    // Clears the tiles, which a context switch would otherwise save.
    ~TileShapes() { asm volatile("tilerelease" ::: "memory"); }
    TileShapes(const TileShapes&) = delete;
    TileShapes& operator=(const TileShapes&) = delete;
};

template <int TILE>
inline void tile_load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
inline void tile_store(void* to) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(int64_t(AMX_BYTES)), "i"(TILE) : "memory");
}
template <int TILE>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

// C += A · B, where A and B are read as signed (s) or unsigned (u) bytes.
#define EXL3_TILE_DOT(name) \
    template <int C, int A, int B> \
    inline void tile_##name() { \
        asm volatile("tdp" #name "d %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); \
    }
EXL3_TILE_DOT(bss)
EXL3_TILE_DOT(bsu)
#undef EXL3_TILE_DOT

}  // namespace

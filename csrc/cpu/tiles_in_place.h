// Tiles that windows are cut from where they lie: of one column, in consecutive k-tiles.
#pragma once

#include <cstdint>

namespace {

struct TilesInPlace {
    const uint32_t* first = nullptr;
    int64_t row_dwords = 0;

    void open(const uint32_t* tile, int64_t dwords_to_next, int, int, int) {
        first = tile;
        row_dwords = dwords_to_next;
    }
    const uint32_t* at(int k) const { return first + k * row_dwords; }
};

}  // namespace

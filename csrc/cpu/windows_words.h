// Window extraction for vectors that shuffle bytes within 16: a shuffle brings the ring bits of two neighbouring windows
// into a dword, two shifts and a blend make two words of it.
//
// The shuffled bytes must be in the ring's order. Tiles are little-endian dwords, whose first window takes bits of the
// last: so half a tile is copied, with its bytes in order and what precedes them in front.
//
// The including file supplies I and its `shuffle_bytes`, `load_halves`, shifts of dwords, `join_words` and
// `reverse_bytes`.
#pragma once

#include "format.h"
#include "repeat.h"

namespace {

// Copies of one half (16 lanes) of some k-tiles of a column.
class OrderedTiles {
   public:
    // SET: 0 for the first 16 lanes, 1 for the others.
    void open(const uint32_t* tile, int64_t row_dwords, int count, int half_bits, int set) {
        const int dwords = 2 * half_bits;
        for (int k = 0; k < count; k++) {
            const uint32_t* from = tile + k * row_dwords;
            const uint32_t before = __builtin_bswap32(from[(set ? dwords : 2 * dwords) - 1]);
            std::memcpy(bytes_[k] + BEFORE - 4, &before, sizeof before);
            reverse_bytes(bytes_[k] + BEFORE, from + set * dwords, dwords);
        }
    }
    const uint8_t* at(int k) const { return bytes_[k] + BEFORE; }

   private:
    static constexpr int BEFORE = 32;  // of which four are used
    static constexpr int MOST = 128, AFTER = 32;  // a load of 16 bytes begins within the half
    static constexpr int TILES = 8;

    alignas(32) uint8_t bytes_[TILES][BEFORE + MOST + AFTER];
};

// Each half of the vector holds 16 ring bytes, from FIRST after the first of two lanes on.
template <int FIRST>
inline I load_lanes(const uint8_t* half, int half_bits, int group) {
    const uint8_t* from = half + 2 * half_bits * group + FIRST;
    return load_halves(from, from + half_bits);
}

// Position, in a half's two lanes, of a result's dword: 2i and 2i + 1 hold lane i's positions j and j + 4.
inline int position_of_dword(int dword, int j) { return dword / 2 % 2 * 8 + j + 4 * (dword % 2); }

// Any K but 8.
struct AnyWindows {
    using Tiles = OrderedTiles;
    static constexpr int FIRST = -2;  // the first window begins at most 16 bits before its lane
    I order[2], right[2], left[2];
    int half_bits;

    explicit AnyWindows(int half_bits) : half_bits(half_bits) {
        for (int pair = 0; pair < 2; pair++) {
            int8_t from[32];
            int32_t low[8], high[8];
            for (int i = 0; i < 8; i++) {
                const int t = position_of_dword(i, 2 * pair);
                const int first_end = window_end(half_bits, t), end = window_end(half_bits, t + 1);
                const int last = (end + 7) / 8;
                for (int byte = 0; byte < 4; byte++) {
                    const int at = last - 1 - byte - FIRST;
                    from[4 * i + byte] = int8_t(at < 0 ? -1 : at);  // no bit of that byte is used
                }
                low[i] = 8 * last - first_end;
                high[i] = 16 - (8 * last - end);
            }
            order[pair] = ::load(from);
            right[pair] = shift_counts_right(::load(low));
            left[pair] = ::load(high);
        }
    }

    I load(const uint8_t* half, int group) const { return load_lanes<FIRST>(half, half_bits, group % 4); }

    // Windows j and j + 1, and j + 4 and j + 5, of each lane, as words.
    template <int J>
    I pair(I bytes) const {
        const I both = shuffle_bytes(bytes, order[J / 2]);
        return join_words(shift_right(both, right[J / 2]), shift_left(both, left[J / 2]));
    }
};

// K = 8: every window is two whole bytes.
struct ByteWindows {
    using Tiles = OrderedTiles;
    struct Bytes {
        I first, second;
    };
    I order;

    explicit ByteWindows(int) {
        int8_t from[32];
        for (int i = 0; i < 16; i++) {
            const int t = position_of_dword(i / 2, 0) + i % 2;
            for (int byte = 0; byte < 2; byte++) from[2 * i + byte] = int8_t(t + 1 - byte);
        }
        order = ::load(from);
    }

    // 17 bytes hold all windows of two lanes, so that each pair of positions has a vector of its own.
    Bytes load(const uint8_t* half, int group) const {
        return {load_lanes<-1>(half, 16, group % 4), load_lanes<1>(half, 16, group % 4)};
    }

    template <int J>
    I pair(const Bytes& bytes) const {
        return shuffle_bytes(J ? bytes.second : bytes.first, order);
    }
};

template <class Function>
void with_windows(int half_bits, Function&& function) {
    half_bits == 16 ? function(Kind<ByteWindows>{}) : function(Kind<AnyWindows>{});
}

}  // namespace

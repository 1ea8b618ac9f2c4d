// Window extraction for AVX2: a byte shuffle brings the ring bits of two neighbouring windows into a dword, two shifts
// and a blend make two words of it.
//
// The shuffle works on 16 bytes, which must be in the ring's order. Tiles are little-endian dwords, whose first window
// takes bits of the last: so half a tile is copied, with its bytes in order and what precedes them in front.
#pragma once

#include "format.h"
#include "repeat.h"
#include "simd_avx2.h"

namespace {

// Copies of one half (16 lanes) of some k-tiles of a column.
class OrderedTiles {
   public:
    // SET: 0 for the first 16 lanes, 1 for the others.
    void open(const uint32_t* tile, int64_t row_dwords, int count, int half_bits, int set) {
        for (int k = 0; k < count; k++) copy(tile + k * row_dwords, half_bits, set, bytes_[k] + BEFORE);
    }
    const uint8_t* at(int k) const { return bytes_[k] + BEFORE; }

   private:
    static constexpr int BEFORE = 32;  // of which four are used
    static constexpr int MOST = 128, AFTER = 32;  // a load of 16 bytes begins within the half
    static constexpr int TILES = 8;

    static void copy(const uint32_t* tile, int half_bits, int set, uint8_t* to) {
        const int dwords = 2 * half_bits;
        const uint32_t before = __builtin_bswap32(tile[(set ? dwords : 2 * dwords) - 1]);
        std::memcpy(to - 4, &before, sizeof before);
        const uint32_t* from = tile + set * dwords;
        const __m128i half = _mm_setr_epi8(3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12);
        const I order = _mm256_broadcastsi128_si256(half);
        int done = 0;
        for (; done + 8 <= dwords; done += 8) store(to + 4 * done, _mm256_shuffle_epi8(::load(from + done), order));
        if (dwords & 4) {
            store_words(to + 4 * done, _mm_shuffle_epi8(load_words(from + done), half));
            done += 4;
        }
        // Half-integer rates end in the middle of 16 bytes.
        if (dwords & 2) {
            const __m128i last = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + done));
            store_words(to + 4 * done, _mm_shuffle_epi8(last, half));
        }
    }

    alignas(32) uint8_t bytes_[TILES][BEFORE + MOST + AFTER];
};

// Both halves of a vector hold the ring bytes of two lanes, from FIRST bytes after the lanes' first on.
template <int FIRST>
inline I load_lanes(const uint8_t* half, int half_bits, int group) {
    const uint8_t* from = half + 2 * half_bits * group + FIRST;
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load_words(from)), load_words(from + half_bits), 1);
}

// Byte of a vector of `load_lanes<FIRST>` at which the 16 bits end that end before `bit` of its lanes; both may be
// any window of the 16 positions. Where the dwords 2i, 2i + 1 of a result hold lane i's positions j and j + 4.
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
            right[pair] = ::load(low);
            left[pair] = ::load(high);
        }
    }

    I load(const uint8_t* half, int group) const { return load_lanes<FIRST>(half, half_bits, group % 4); }

    // Windows j and j + 1 of each lane's j and j + 4, as words.
    template <int J>
    I pair(I bytes) const {
        const I both = _mm256_shuffle_epi8(bytes, order[J / 2]);
        return _mm256_blend_epi16(_mm256_srlv_epi32(both, right[J / 2]), _mm256_sllv_epi32(both, left[J / 2]), 0xaa);
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
        return _mm256_shuffle_epi8(J ? bytes.second : bytes.first, order);
    }
};

template <class Function>
void with_windows(int half_bits, Function&& function) {
    half_bits == 16 ? function(Kind<ByteWindows>{}) : function(Kind<AnyWindows>{});
}

}  // namespace

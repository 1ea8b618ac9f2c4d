// The narrow linear kernel and the one that rotates before it on the host, behind two functions for ctypes.
#define __CUDA_ARCH_FEAT_SM90_ALL
#include "ptx.h"
template <class T> inline void __stcg(T* at, T value) { *at = value; }
#include "narrow/narrow.cuh"

template <int ROWS> using Mul1 = Kinds<Kind<8, 2, 0, ROWS>>;
template <int ROWS> using Mixed = Kinds<Kind<5, 2, 0, ROWS>, Kind<8, 0, 1, ROWS>, Kind<8, 1, 1, ROWS>, Kind<12, 2, 0, ROWS>>;
template <int ROWS> using Decoded = Kinds<Kind<5, 2, 2, ROWS>, Kind<6, 1, 2, ROWS>, Kind<8, 0, 2, ROWS>, Kind<8, 1, 2, ROWS>, Kind<12, 2, 2, ROWS>>;

using Fast = Kinds<Kind<8, 2, 3, 8>>;

// `kernel` as test_narrow_host.py numbers them.
template <class F>
void with(int kernel, const F& function) {
    switch (kernel) {
        case 0: return function(Mul1<4>{});
        case 1: return function(Mixed<8>{});
        case 2: return function(Decoded<8>{});
        case 3: return function(Decoded<16>{});
        case 4: return function(Fast{});
        case 5: return function(Decoded<32>{});
        default: return fail("no such kernel");
    }
}

extern "C" void run_narrow(const NarrowArgs* args, int kernel, int columns, int cluster, u32 grid_x, u32 grid_y, u32 shared, int at_once) {
    with(kernel, [=](auto kinds) {
        (at_once ? launch_at_once : launch)(grid_x, grid_y, THREADS, shared, [=] {
            if (cluster) narrow<1, 3, true, decltype(kinds)>(*args);
            else if (columns == 1) narrow<1, 3, false, decltype(kinds)>(*args);
            else narrow<2, 2, false, decltype(kinds)>(*args);
        });
    });
}

extern "C" void run_rotate(const NarrowArgs* args, int kernel, u32 grid_x, u32 grid_y, u32 shared) {
    with(kernel, [=](auto kinds) { launch(grid_x, grid_y, ROTATE_THREADS, shared, [=] { rotate(kinds, *args); }); });
}

extern "C" void run_quotient(const u32* n, const u32* d, u32* out, u32 count) {
    for (u32 i = 0; i < count; ++i) out[i] = quotient(n[i], d[i]);
}
extern "C" void run_over(const u32* n, const u32* inverses, u32* out, u32 count) {
    for (u32 i = 0; i < count; ++i) out[i] = fast_divide(n[i], inverses[i]);
}

template <int CODEBOOK, int HALF_BITS>
void words_of(const u32* tile, bool decoded, u32* out) {
    launch(1, 1, 32, 16 * HALF_BITS, [=] {
        const int lane = threadIdx.x;
        if (lane == 0) memcpy(memory, tile, 16 * HALF_BITS);
        __syncwarp();
        u32 words[Window<HALF_BITS>::words], products[4][8];
        load_words<HALF_BITS>(words, SharedWords{SHARED_BASE}, lane);
        const auto cut = [&](auto kind) {
            using K = decltype(kind);
            eight_words<K, 0>(products[0], words), eight_words<K, 1>(products[1], words);
            eight_words<K, 2>(products[2], words), eight_words<K, 3>(products[3], words);
        };
        if (decoded) cut(Kind<HALF_BITS, CODEBOOK, HALF, 8>{});
        else cut(Kind<HALF_BITS, CODEBOOK, CODEBOOK == MUL1 ? INTEGER : PAIR, 8>{});
        if (lane % 4 == 0) memcpy(out + 8 * lane, products, sizeof products);
    });
}

template <int CODEBOOK>
void words_of_any(const u32* tile, int half_bits, bool decoded, u32* out) {
    switch (half_bits) {
        case 2: return words_of<CODEBOOK, 2>(tile, decoded, out);
        case 3: return words_of<CODEBOOK, 3>(tile, decoded, out);
        case 4: return words_of<CODEBOOK, 4>(tile, decoded, out);
        case 5: return words_of<CODEBOOK, 5>(tile, decoded, out);
        case 6: return words_of<CODEBOOK, 6>(tile, decoded, out);
        case 7: return words_of<CODEBOOK, 7>(tile, decoded, out);
        case 8: return words_of<CODEBOOK, 8>(tile, decoded, out);
        case 10: return words_of<CODEBOOK, 10>(tile, decoded, out);
        case 12: return words_of<CODEBOOK, 12>(tile, decoded, out);
        case 14: return words_of<CODEBOOK, 14>(tile, decoded, out);
        case 16: return words_of<CODEBOOK, 16>(tile, decoded, out);
        default: return fail("no such kind");
    }
}

// The 256 product words of a tile, as the products of an arithmetic take them.
extern "C" void run_words(const u32* tile, int half_bits, int codebook, int decoded, u32* out) {
    switch (codebook) {
        case INST3: return words_of_any<INST3>(tile, half_bits, decoded, out);
        case MCG: return words_of_any<MCG>(tile, half_bits, decoded, out);
        default: return words_of_any<MUL1>(tile, half_bits, decoded, out);
    }
}

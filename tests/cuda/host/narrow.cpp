// The narrow linear kernel and the one that rotates before it on the host, behind two functions for ctypes.
#define __CUDA_ARCH_FEAT_SM90_ALL
#include "ptx.h"
template <class T> inline void __stcg(T* at, T value) { *at = value; }
#include "narrow.cuh"

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
        default: stop("no such kernel");
    }
}

extern "C" void run_narrow(const NarrowArgs* args, int kernel, int columns, int cluster, u32 grid_x, u32 grid_y, u32 shared) {
    with(kernel, [=](auto kinds) {
        launch(grid_x, grid_y, THREADS, shared, [=] {
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
    for (u32 i = 0; i < count; ++i) out[i] = over(n[i], inverses[i]);
}

template <int HALF_BITS>
void states_of(const u32* tile, u32* out) {
    launch(1, 1, 32, 16 * HALF_BITS, [=] {
        const int lane = threadIdx.x;
        if (lane == 0) memcpy(memory, tile, 16 * HALF_BITS);
        __syncwarp();
        u32 words[Window<HALF_BITS>::words], states[4][8];
        load_words<HALF_BITS>(words, SharedWords{SHARED_BASE}, lane);
        eight_states<HALF_BITS, 0>(states[0], words), eight_states<HALF_BITS, 1>(states[1], words);
        eight_states<HALF_BITS, 2>(states[2], words), eight_states<HALF_BITS, 3>(states[3], words);
        if (lane % 4 == 0) memcpy(out + 8 * lane, states, sizeof states);
    });
}

// The 256 states of a tile.
extern "C" void run_states(const u32* tile, int half_bits, u32* out) {
    switch (half_bits) {
        case 2: return states_of<2>(tile, out);
        case 3: return states_of<3>(tile, out);
        case 4: return states_of<4>(tile, out);
        case 5: return states_of<5>(tile, out);
        case 6: return states_of<6>(tile, out);
        case 7: return states_of<7>(tile, out);
        case 8: return states_of<8>(tile, out);
        case 10: return states_of<10>(tile, out);
        case 12: return states_of<12>(tile, out);
        case 14: return states_of<14>(tile, out);
        case 16: return states_of<16>(tile, out);
        default: stop("no such kind");
    }
}

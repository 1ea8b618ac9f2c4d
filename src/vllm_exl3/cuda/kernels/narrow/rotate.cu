// The input side of a narrow launch as a kernel of its own, for launches whose blocks would rotate the same channels too often;
// the macros are those of narrow/narrow.cu.
#include "narrow/narrow.cuh"

extern "C" __global__ void __launch_bounds__(ROTATE_THREADS) exl3_narrow_rotate(const __grid_constant__ NarrowArgs args) {
    rotate(Kinds<INSTANCE_KINDS>{}, args);
}

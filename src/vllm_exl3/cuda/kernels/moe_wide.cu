// One instance of the grouped GEMM for many rows; the compiler's caller defines
//   INSTANCE_PAIRS  pairs of warpgroups of a block: 2 for row blocks of up to 128 rows, 1 for up to 256
//   INSTANCE_KINDS  the (2·K, codebook, arithmetic) triples of the layer's experts, as `Kind<…>` list
#include "moe_wide.cuh"

extern "C" __global__ void __launch_bounds__(INSTANCE_PAIRS * PAIR_THREADS, 1) exl3_moe_wide(const __grid_constant__ MoeArgs args) {
    moe_wide<INSTANCE_PAIRS, WideKinds<INSTANCE_KINDS>>(args);
}

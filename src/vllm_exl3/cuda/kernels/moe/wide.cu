// One instance of the grouped GEMM for many rows; the compiler's caller defines
//   INSTANCE_BLOCKS  blocks that a multiprocessor holds
//   INSTANCE_K_BLOCKS   k blocks of a stage of the pipeline
//   INSTANCE_ROWS    rows of the largest row block
//   INSTANCE_LEAST, INSTANCE_STEP  columns of the narrowest product, and from one width to the next
//   INSTANCE_KINDS   the (2·K, codebook, arithmetic) triples of the layer's experts, as `Kind<…>` list
#include "moe/wide.cuh"

extern "C" __global__ void __launch_bounds__(PAIR_THREADS, INSTANCE_BLOCKS) exl3_moe_wide(const __grid_constant__ MoeArgs args) {
    moe_wide<INSTANCE_K_BLOCKS, INSTANCE_ROWS, INSTANCE_LEAST, INSTANCE_STEP, WideKinds<INSTANCE_KINDS>>(args);
}

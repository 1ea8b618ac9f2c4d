// One instance of the grouped GEMM; the compiler's caller defines
//   INSTANCE_TILE_ROWS  rows of a row block: 4, 8 or 16
//   INSTANCE_WARPS      warps of a block: 8, or 16 where a work tile gets a multiprocessor to itself
//   INSTANCE_BLOCKS     blocks that a multiprocessor holds
//   INSTANCE_KINDS      the (2·K, codebook, arithmetic) triples of the layer's experts, as `Kind<…, INSTANCE_TILE_ROWS>` list
#include "moe/gemm.cuh"

extern "C" __global__ void __launch_bounds__(MOE_THREADS, INSTANCE_BLOCKS) exl3_moe_gemm(const __grid_constant__ MoeArgs args) {
    moe_gemm<INSTANCE_TILE_ROWS, MoeKinds<INSTANCE_KINDS>>(args);
}

// One instance of the trellis GEMM for many tokens; the compiler's caller defines
//   INSTANCE_TILE_ROWS  tokens a row tile holds: 32, 64 or 128
//   INSTANCE_SPLIT_K    1 for layers that give a block few k blocks (wide/wide.cuh)
//   INSTANCE_KINDS      the (2·K, codebook, arithmetic) triples of the layer's shards, as `Kind<…, INSTANCE_TILE_ROWS>` list
#include "wide/wide.cuh"

extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1) exl3_linear_wide(const __grid_constant__ LinearArgs args) {
    linear_wide<INSTANCE_TILE_ROWS, INSTANCE_SPLIT_K, WideKinds<INSTANCE_KINDS>>(args);
}

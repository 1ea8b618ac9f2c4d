// One instance of the trellis GEMM; the compiler's caller defines
//   INSTANCE_PLANES     1 to rotate the input in the GEMM, 0 to read what the transform kernel wrote
//   INSTANCE_TILE_ROWS  tokens a row tile holds
//   INSTANCE_WARPS      warps of a block
//   INSTANCE_KINDS      the (2·K, codebook, arithmetic) triples of the layer's shards, as `Kind<…, INSTANCE_TILE_ROWS>` list
#include "linear.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) exl3_linear(const __grid_constant__ LinearArgs args) {
    linear<INSTANCE_PLANES, INSTANCE_TILE_ROWS, Kinds<INSTANCE_KINDS>>(args);
}

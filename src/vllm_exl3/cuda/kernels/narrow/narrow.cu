// One instance of the narrow trellis GEMM; the compiler's caller defines
//   INSTANCE_TILE_ROWS  tokens a row tile holds
//   INSTANCE_COLUMNS    tile columns a warp multiplies
//   INSTANCE_STAGES       k blocks that each warp's pipeline holds
//   INSTANCE_CLUSTER    1 where the blocks of an n tile form a cluster
//   INSTANCE_KINDS      the (2·K, codebook, arithmetic) triples of the layer's shards, as `Kind<…, INSTANCE_TILE_ROWS>` list
#include "narrow/narrow.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) exl3_narrow(const __grid_constant__ NarrowArgs args) {
    narrow<INSTANCE_COLUMNS, INSTANCE_STAGES, INSTANCE_CLUSTER != 0, Kinds<INSTANCE_KINDS>>(args);
}

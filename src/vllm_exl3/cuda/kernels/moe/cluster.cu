// One instance of the grouped GEMM for the largest row blocks; the compiler's caller defines
//   INSTANCE_CLUSTER  thread blocks of a cluster
//   INSTANCE_ROWS, INSTANCE_LEAST, INSTANCE_STEP, INSTANCE_KINDS  as for moe/wide.cu
#include "moe/cluster.cuh"

extern "C" __global__ void __launch_bounds__(PRODUCER_THREADS + PAIR_THREADS, 1) exl3_moe_cluster(const __grid_constant__ MoeArgs args) {
    moe_cluster<INSTANCE_ROWS, INSTANCE_LEAST, INSTANCE_STEP, WideKinds<INSTANCE_KINDS>>(args);
}

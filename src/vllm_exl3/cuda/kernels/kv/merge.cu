// One instance of adding up segments; the caller defines INSTANCE_SIZE.
#include "kv/merge.cuh"

extern "C" __global__ void __launch_bounds__(KV_MERGE_THREADS) exl3_kv_merge(const __grid_constant__ KvMergeArgs args) {
    kv_merge<INSTANCE_SIZE>(args);
}

// One instance of the prefill GEMM on bytes; the compiler's caller defines
//   INSTANCE_TOKENS     tokens of a tile: 192 or 256
//   INSTANCE_KINDS      the (2·K, codebook) pairs of the layer's shards, as a `PrefillKind<…>` list
#include "prefill/int8.cuh"

extern "C" __global__ void __launch_bounds__(PRODUCER_THREADS + PAIR_THREADS, 1) exl3_prefill_int8(const __grid_constant__ PrefillArgs args) {
    prefill_int8<ByteShape<INSTANCE_TOKENS, 2>, PrefillKinds<INSTANCE_KINDS>>(args);
}

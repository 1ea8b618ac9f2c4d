// One instance of the prefill GEMM for GPUs without wgmma; the compiler's caller defines
//   INSTANCE_TOKENS     tokens of a tile: 64 or 128
//   INSTANCE_KINDS      the (2·K, codebook) pairs of the layer's shards, as a `PrefillKind<…>` list
#include "prefill/mma.cuh"

// Tiles of 64 tokens leave registers for a second block on a multiprocessor.
extern "C" __global__ void __launch_bounds__(PAIR_THREADS, INSTANCE_TOKENS <= 64 ? 2 : 1) exl3_prefill_mma(const __grid_constant__ PrefillArgs args) {
    prefill_mma<Shape<INSTANCE_TOKENS, 1, 1>, PrefillKinds<INSTANCE_KINDS>>(args);
}

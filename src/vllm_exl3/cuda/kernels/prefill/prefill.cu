// One instance of the prefill GEMM; the compiler's caller defines
//   INSTANCE_TOKENS     tokens of a tile: 64, 128, 192 or 256
//   INSTANCE_KINDS      the (2·K, codebook) pairs of the layer's shards, as a `PrefillKind<…>` list
#include "prefill/prefill.cuh"

// An n tile is two Hadamard blocks that share activations. Up to 128 tokens registers suffice for both in one block.
constexpr int PAIRS = INSTANCE_TOKENS <= 128 ? 2 : 1, COPYING = 24, REGISTERS = PAIRS == 2 ? 112 : 240;

extern "C" __global__ void __launch_bounds__(PRODUCER_THREADS + PAIRS * PAIR_THREADS, 1) exl3_prefill(const __grid_constant__ PrefillArgs args) {
    prefill<Shape<INSTANCE_TOKENS, PAIRS, 2 / PAIRS>, COPYING, REGISTERS, PrefillKinds<INSTANCE_KINDS>>(args);
}

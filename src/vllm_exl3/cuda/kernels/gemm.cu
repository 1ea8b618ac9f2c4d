// One instance of the trellis GEMM for up to 128 tokens; the compiler's caller defines
//   INSTANCE_TOKENS     tokens that share one decoding of the weights: 8 to 64 in steps of 8
//   INSTANCE_KINDS      the (2·K, codebook) pairs of the layer's shards, as a `GemmKind<…>` list
#include "gemm.cuh"

using Kinds = GemmKinds<INSTANCE_KINDS>;

extern "C" __global__ void __maxnreg__(GemmRegisters<Kinds>::start) exl3_gemm(const __grid_constant__ PrefillArgs args) {
    gemm<INSTANCE_TOKENS, Kinds>(args);
}

// One instance of the trellis GEMM for up to 128 tokens; the compiler's caller defines
//   INSTANCE_TOKENS     tokens that share one decoding of the weights: `GEMM_TILES` of gemm_plan.py
//   INSTANCE_KINDS      the (2·K, codebook, arithmetic) triples of the layer's shards, as a `GemmKind<…>` list
#include "gemm/gemm.cuh"

using Kinds = GemmKinds<INSTANCE_KINDS>;
using Registers = GemmRegisters<INSTANCE_TOKENS, Kinds>;

extern "C" __global__ void __maxnreg__(Registers::start) exl3_gemm(const __grid_constant__ PrefillArgs args) {
    gemm<INSTANCE_TOKENS, Kinds>(args);
}

// One instance of the prefill GEMM on bytes; the compiler's caller defines what it does for prefill.cu.
#include "prefill_int8.cuh"

constexpr int PAIRS = INSTANCE_TOKENS <= 128 ? 2 : 1, REGISTERS = PAIRS == 2 ? 112 : 240;

extern "C" __global__ void __launch_bounds__(PRODUCERS + PAIRS * PAIR_THREADS, 1) exl3_prefill_int8(const __grid_constant__ PrefillArgs args) {
    prefill<ByteShape<INSTANCE_TOKENS, PAIRS, 2 / PAIRS>, REGISTERS, PrefillKinds<INSTANCE_KINDS>>(args);
}

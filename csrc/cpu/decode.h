// Decoding whole matrices, bit exact, to float32, float16 or bfloat16.
#pragma once

#include <cstdint>

#include "abi.h"
#include "kernels.h"

namespace exl3 {

// The fp16 weights of all 65,536 states.
const uint16_t* codebook_table(int codebook);

void dequantize(const Kernels& kernels, const exl3_shard* shards, int count, const uint16_t* trellis,
                const uint16_t* suh, const uint16_t* svh, bool rotated, int dtype, void* out, int64_t stride,
                int threads);

}  // namespace exl3

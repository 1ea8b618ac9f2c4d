// The encoder: the trellis whose decoded weights are nearest to a matrix.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace exl3 {

// Encodes weights [rows][stride], already rotated and scaled for the codebook, to the tiles of a
// trellis [rows / 16][columns / 16][16·K]. Returns the sum of the squared errors.
double encode(const Kernels& kernels, const float* weights, int64_t stride, int64_t rows, int64_t columns,
              int half_bits, int codebook, uint16_t* trellis, int threads);

}  // namespace exl3

// The kernels for AVX2 with FMA and F16C.
#include "simd_avx2.h"
#include "fixed_words.h"

#include "decode_words.h"
#include "windows_words.h"

#include "linear_kernels.h"
#include "expert_kernels.h"
#include "row_kernels.h"
#include "viterbi_kernels.h"

namespace exl3 {

const Kernels kernels_avx2 = {
    "avx2", STRIP_ROWS, prepare, nullptr, strip, panel, multiply_panel, finish, activate, combine, hadamard, viterbi, gather_row,
};

}  // namespace exl3

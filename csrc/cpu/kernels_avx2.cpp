// The kernels for AVX2 with FMA and F16C.
#include "decode_avx2.h"
#include "windows_avx2.h"

#include "linear_kernels.h"
#include "row_kernels.h"
#include "viterbi_kernels.h"

namespace exl3 {

const Kernels kernels_avx2 = {
    "avx2", STRIP_ROWS, prepare, strip, panel, multiply_panel, finish, hadamard, viterbi, gather_row,
};

}  // namespace exl3

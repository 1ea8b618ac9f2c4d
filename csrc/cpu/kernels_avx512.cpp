// The kernels for AVX-512 (F, BW, VL, DQ).
#include "words_avx512.h"

#include "decode_words.h"
#include "windows_permute.h"

#include "linear_kernels.h"
#include "expert_kernels.h"
#include "row_kernels.h"
#include "viterbi_kernels.h"

namespace exl3 {

const Kernels kernels_avx512 = {
    "avx512", 10, prepare, nullptr, strip, panel, multiply_panel, finish, activate, combine, hadamard, viterbi, gather_row,
};

}  // namespace exl3

// The kernels for AVX-512 with VNNI, VBMI, VBMI2 and FP16.
#include "words_avx512.h"

#include "decode_words.h"
#include "windows_multishift.h"

#include "linear_kernels.h"
#include "expert_kernels.h"
#include "row_kernels.h"
#include "viterbi_kernels.h"

namespace exl3 {

const Kernels kernels_avx512_fp16 = {
    "avx512_fp16", 10, prepare, nullptr, strip, panel, multiply_panel, finish, activate, combine, hadamard, viterbi, gather_row,
};

}  // namespace exl3

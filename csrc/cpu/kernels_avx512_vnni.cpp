// The kernels for AVX-512 with VNNI.
#include "words_avx512.h"

#include "decode_words.h"
#include "windows_permute.h"

#include "linear_kernels.h"
#include "expert_kernels.h"
#include "row_kernels.h"
#include "viterbi_kernels.h"

namespace exl3 {

const Kernels kernels_avx512_vnni = {
    "avx512_vnni", 10, prepare, nullptr, strip, panel, multiply_panel, finish, activate, combine, hadamard, viterbi, gather_row,
};

}  // namespace exl3

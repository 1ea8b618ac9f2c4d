// The kernels for AVX-512 with VNNI, VBMI and VBMI2, in dwords.
#include "decode_avx512.h"
#include "windows_vbmi.h"

#include "linear_kernels.h"
#include "expert_kernels.h"
#include "row_kernels.h"
#include "viterbi_kernels.h"

namespace exl3 {

const Kernels kernels_avx512_vbmi = {
    "avx512_vbmi", 10, prepare, nullptr, strip, panel, multiply_panel, finish, activate, combine, hadamard, viterbi, gather_row,
};

}  // namespace exl3

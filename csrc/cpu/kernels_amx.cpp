// The kernels for AVX-512 with VNNI, VBMI, VBMI2 and FP16, and AMX with int8, which multiplies many rows.
#include "words_avx512.h"

#include "decode_words.h"
#include "windows_multishift.h"

#include "linear_kernels.h"
#include "expert_kernels.h"
#include "amx_panel_kernels.h"
#include "row_kernels.h"
#include "viterbi_kernels.h"

namespace exl3 {

const Kernels kernels_amx = {
    "amx",  14, prepare, arrange_bytes, strip, panel_planes, multiply_panel_planes, finish, activate, combine, hadamard,
    viterbi, gather_row,
};

}  // namespace exl3

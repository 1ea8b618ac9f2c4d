#include "rings.h"

#include <array>

#include "decode.h"
#include "float16.h"
#include "format.h"

namespace exl3 {

const float* mul1_by_sum() {
    static const std::array<float, 1021> values = [] {
        std::array<float, 1021> found{};
        const uint16_t* weights = codebook_table(MUL1);
        for (uint32_t state = 0; state < 65536; state++) found[mul1_sum(state)] = half_to_float(weights[state]);
        return found;
    }();
    return values.data();
}

}  // namespace exl3

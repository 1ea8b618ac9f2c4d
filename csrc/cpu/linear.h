// The linear of a fused layer: how a call is cut into units of work for the kernels.
#pragma once

#include <cstdint>

#include "abi.h"
#include "kernels.h"

namespace exl3 {

void linear(const Kernels& kernels, const exl3_linear_call& call);

}  // namespace exl3

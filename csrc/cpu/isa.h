// Which kernels run on this CPU.
#pragma once

#include "kernels.h"

namespace exl3 {

// The chosen kernels; the best that the CPU runs until `select_kernels` says otherwise.
const Kernels& kernels();

// Chooses by name, "auto" for the best. False when the name is unknown or the CPU cannot run it.
bool select_kernels(const char* name);

}  // namespace exl3

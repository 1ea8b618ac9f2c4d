// Launches of CUDA kernels by the driver, for calls that no CUDA graph replays: filling in arguments and describing a launch takes Python
// longer than the driver takes to launch.
//
// Nothing of CUDA is needed to build this. The driver's functions come as addresses, and the two structures that they read are declared in
// launch.cpp, as the driver's interface has them since CUDA 11.8.
#pragma once

#include "../cpu/abi.h"

namespace exl3 {

void set_driver(void* launch_kernel, void* get_context, void* push_context, void* pop_context);

// Runs a program; returns the driver's status, or EXL3_BAD_PROGRAM.
int launch(const exl3_program& program, const uint64_t* values, void* stream);

}  // namespace exl3

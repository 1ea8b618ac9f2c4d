// The CPU's share of a layer's routed experts, as work of CUDA streams: what the GPU sends comes to pinned memory, a host function computes,
// and the reply goes back, while the stream that it forks from runs the GPU's share. CUDA graphs can be captured of it.
//
// As in launch.cpp the driver's functions come as addresses.
#pragma once

#include "../cpu/abi.h"

namespace exl3 {

void set_share_driver(const exl3_share_driver& functions);

// Returns the driver's status, or EXL3_BAD_PROGRAM where there is no driver.
int enqueue_share(const exl3_share_launch& launch);

}  // namespace exl3

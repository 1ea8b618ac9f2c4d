// The widths of moe_wgmma.cuh are among those of the host's template.
#pragma once
#include "wgmma.cuh"

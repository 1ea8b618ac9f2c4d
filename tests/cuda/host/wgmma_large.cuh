// The host's wgmma takes any number of columns.
#pragma once
#include "wgmma.cuh"

// The inner loops of a linear, written once over the vector type of the including file.
//
// That file supplies, for vectors of LANES dwords: I and F, their arithmetic, the 4 x 4 exchanges
// between lanes, and how much its registers hold (STRIP_ROWS, MULTIPLY_ROWS rows, PANEL_VECTORS
// vectors of columns); classes of windows (the 16-bit states of a tile), of which `with_windows` picks
// one by rate; and Decoder<codebook> (two vectors of states to int16 weight pairs). A "group" is
// LANES / 2 lanes of a tile; the dwords 2i and 2i + 1 of its vectors belong to lane i: position j
// (column c) and j + 4 (column c + 8). For a fixed j the row depends on i % 4 only, so one activation
// vector serves every group of every tile.
#pragma once

#include "finish_kernels.h"
#include "panel_kernels.h"
#include "prepare_kernels.h"
#include "strip_kernels.h"

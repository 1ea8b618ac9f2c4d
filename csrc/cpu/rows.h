// Rows of quantized tables, gathered and decoded: int8 and int4 integers, EXL3 row codes, n-gram rows.
#pragma once

#include "abi.h"

namespace exl3 {

enum RowKind : int { INT8_ROWS = 0, INT4_ROWS = 1, CODED_ROWS = 2, NGRAM_ROWS = 3 };

constexpr int INTEGER_GROUP = 128;  // columns of int4 that share a scale
constexpr int CODED_WIDTH = 256;  // values of an embedding's ring, rotated together
constexpr int NGRAM_WIDTH = 160;  // values of an n-gram row

// out[i] = the row that ids[i] (or index[i]) names; the caller has checked that it lies in the table.
void gather_rows(const exl3_row_call& call);

}  // namespace exl3

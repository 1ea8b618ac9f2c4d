#include "rows.h"

#include <algorithm>

#include "isa.h"
#include "parallel.h"

namespace exl3 {
namespace {

constexpr int64_t ROWS_AT_ONCE = 4;  // rows of one unit of work

}  // namespace

void gather_rows(const exl3_row_call& call) {
    const auto gather = kernels().gather_row;
    parallel_for((call.count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, call.threads, [&](int64_t unit, int) {
        const int64_t last = std::min(call.count, (unit + 1) * ROWS_AT_ONCE);
        for (int64_t row = unit * ROWS_AT_ONCE; row < last; row++) gather(call, row);
    });
}

}  // namespace exl3

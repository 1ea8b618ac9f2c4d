// Routed experts: a token through each of its experts, in one call.
#pragma once

#include "abi.h"
#include "context.h"
#include "kernels.h"

namespace exl3 {

// What a call is refused for, if anything.
enum class MoeFault { NONE, SIZE, DTYPE, ACTIVATION, POINTER, EXPERT };

// The call without the rows of its table.
MoeFault check_call(const exl3_moe_call& call);
// The table's row of one expert.
MoeFault check_expert(const exl3_moe_call& call, int64_t expert);

// Runs a call that `check_call` found nothing wrong with. Only experts that it uses are checked, before anything is
// computed for the tokens that use them. Throws std::bad_alloc.
MoeFault run_experts(const Kernels& kernels, const exl3_moe_call& call, exl3_context& context);

// Bytes of scratch memory that no call with these sizes exceeds; `fault` says what is wrong with the table.
size_t most_scratch(const Kernels& kernels, const exl3_moe_call& call, const exl3_context& context, MoeFault& fault);

}  // namespace exl3

// How a call of routed experts is cut: slots grouped by expert, where everything lies, and units of work in the order in
// which threads take them.
//
// A slot is one choice of one token; those of an expert have consecutive places. Units of a kind wait only for units that
// were taken before, so threads need no barrier: while the last columns of one kind are in work, the next kind has begun.
#pragma once

#include <atomic>
#include <cstdint>

#include "abi.h"
#include "kernels.h"
#include "moe.h"
#include "weights.h"

namespace exl3 {

enum class Step : int32_t {
    INPUTS,   // rotate and quantise rows of x
    UP,       // gate and up of some columns, and the activation
    HIDDEN,   // rotate and quantise rows between the projections
    DOWN,     // some columns of down
    COMBINE,  // sums of tokens
};

struct MoeUnit {
    Step step;
    int32_t group;
    int32_t first, count;  // blocks of 128 columns
    int32_t begin, end;    // rows of the group; tokens of the part
};

// The slots of one expert.
struct Group {
    const exl3_projection* projections;
    Weights weights[3];      // as in the table
    const float* bias[3];    // or null
    Rows inputs[2];          // for gate and up, or up alone; the same where both take the same
    Rows hidden;
    int64_t place, count;    // of its slots
    bool few;                // rows are multiplied while weights are decoded
    std::atomic<int32_t> inputs_left, up_left, hidden_left;  // units
};

struct ThreadScratch {
    float* sums[2];   // for gate and up
    float* row;       // [hidden]
    int16_t* panel;
};

// Consecutive tokens that are computed together.
struct MoePlan {
    int64_t first_token, tokens;
    int64_t group_count, unit_count, slot_count;
    int64_t up_blocks, down_blocks;  // of 128 columns that are computed
    int64_t sums_stride[2];          // of few rows, of many
    Group* groups;
    MoeUnit* units;
    int32_t* slots;   // [places], token of the part · top_k + choice
    int32_t* places;  // [tokens · top_k], or -1
    float* activated;  // [places][intermediate]
    float* values;     // [places][hidden]
    ThreadScratch* threads;
    std::atomic<int32_t>* down_left;  // units
};

// Tokens of a part, whose memory is bounded whatever the length of a prompt.
int64_t tokens_at_once(const exl3_moe_call& call);

// Plans some tokens, in memory of `scratch`, which grows as needed.
MoeFault plan_tokens(const Kernels& kernels, const exl3_moe_call& call, int threads, int64_t first, int64_t tokens,
                     Scratch& scratch, MoePlan& plan);

}  // namespace exl3

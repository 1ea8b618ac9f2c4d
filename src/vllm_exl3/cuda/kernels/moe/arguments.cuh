// Launch arguments of the kernels of routed experts. The host reads the declarations (cuda/declarations.py).
//
// A slot is one (token, choice) pair, numbered token·top_k + choice. Everything that depends on the routing is found on the
// device: launches have fixed shapes, and read how much there is to do.
#pragma once
#include "base/codebook.cuh"
#include "base/launch.cuh"
#include "base/shapes.cuh"

constexpr int TABLE_COLUMNS = 8;
constexpr u32 NOWHERE = 0xffffffffu;
constexpr u32 CHUNK_ROWS = 16;  // that are transformed together where rows are grouped

// One row of the table of vllm_exl3/ops/experts.py.
struct Projection {
    i64 trellis, suh, svh, bias, half_bits, codebook, in_features, out_features;
};

// Rows of one expert that share one decoding of its weights.
struct RowBlock {
    u32 expert;
    u32 first;  // its first row's place in `sorted_slots`
    u32 rows;
    u32 kind;  // in `schedule`: which projection of the stage, from bit 8 on its 2·K, from bit 16 on its codebook
};

// gate and up (or up alone), or down.
struct MoeStage {
    const u16* trellis;  // flat, as the next three
    const u16* suh;
    const u16* svh;
    const float* bias;   // or null
    u8* rows;            // scratch: transformed activations of every row, laid out as `MoeArgs::grouped` says
    float* descale;         // scratch: what undoes a row's scale; [slot][projection], where rows are grouped
                         // [projection][place in `sorted_slots`]
    int* sums;           // scratch, the same: sums of quantised activations; where rows are grouped, floats
    void* out;           // scratch [slot][projection][out_features]: float32; where rows are grouped as moe/epilogue.cuh says
    RowBlock* schedule;     // scratch: row blocks with each of the stage's projections, kind by kind; where rows are grouped and kinds mix
    u32 first;           // its first projection in a row of the table
    u32 projections;
    u32 in_width;        // channels that are not padding
    u32 in_features;
    u32 out_width;
    u32 out_features;
};

struct MoeArgs {
    MoeStage stages[2];
    const i64* table;         // [experts][projections of both stages][TABLE_COLUMNS]
    const void* x;            // [tokens][hidden]
    void* out;                // [tokens][hidden]
    const float* weights;     // [slots]
    const void* ids;          // [slots]: experts' numbers in the model
    const int* expert_map;    // their numbers here, or negative; null where all are here
    u32* sorted_slots;               // scratch: slots, expert by expert
    u32* slot_positions;              // scratch [slots]: where a slot is in `sorted_slots`, or NOWHERE
    RowBlock* blocks;         // scratch
    RowBlock* chunks;         // scratch: chunks of CHUNK_ROWS rows, experts' first, then their second ones; where rows are grouped
    u32* list_sizes;          // scratch [2]: how many blocks and chunks
    u32* totals;              // scratch [blocks of exl3_moe_route][experts]: how often each occurs in a block's slots
    float* row_largest;       // scratch [tokens]: the largest magnitude of x; where rows are grouped
    float* scale_largest;     // scratch [experts][projections of the first stage]: the same of input scales
    u32* starts;              // scratch [experts + 1]: where each expert's rows begin in `sorted_slots`
    i64 x_stride;             // elements
    i64 out_stride;
    u32 stage;                // which one this launch works on
    u32 tokens, top_k, slots;
    u32 experts;              // here
    u32 mapped;               // entries of expert_map
    u32 projections;          // of both stages
    u32 wide_ids;             // 1 where ids are int64
    u32 x_type, out_type;
    u32 tile_rows;            // rows of a full row block of an expert that has more than fat_rows of them
    u32 thin_rows;            // and of the others
    u32 fat_rows;
    u32 row_padding;          // experts begin at multiples of it in `sorted_slots`
    u32 padded_rows;          // rows that `rows` has room for, a projection
    u32 identity;             // 1: the codebooks' identities; 0: fp16
    u32 grouped;              // how `rows` lies (moe/rows.cuh)
    u32 keep_hidden;          // of moe/group_hidden.cuh: what was activated fits shared memory
    u32 pipeline_stages;          // of moe/wide.cuh: stages of the pipeline,
    u32 stage_stride;          // bytes from one to the next,
    u32 weight_pitch;         // from one k-tile row of weights to the next,
    u32 activation_stride;    // and from one k block's activations to the next
    u32 weight_on_input;
    u32 activation;           // an `ActivationKind`
    float alpha, beta, limit;
};

// `sums` where rows are grouped.
__device__ __forceinline__ float* sums_of_rows(const MoeStage& stage) { return reinterpret_cast<float*>(stage.sums); }

__device__ __forceinline__ const Projection& projection_of(const MoeArgs& args, u32 expert, u32 index) {
    static_assert(sizeof(Projection) == 8 * TABLE_COLUMNS, "a row of the table");
    return reinterpret_cast<const Projection*>(args.table)[expert * args.projections + index];
}

// The slot's expert on this rank, or -1.
__device__ __forceinline__ int expert_of(const MoeArgs& args, u32 slot) {
    i64 id = args.wide_ids ? static_cast<const i64*>(args.ids)[slot] : static_cast<const int*>(args.ids)[slot];
    if (id < 0) return -1;
    if (args.expert_map != nullptr) id = id < args.mapped ? args.expert_map[id] : -1;
    return id < args.experts ? static_cast<int>(id) : -1;
}

// Four neighbouring outputs of one slot of a stage; where rows are not grouped.
__device__ __forceinline__ float4 stage_output(const MoeStage& stage, u32 slot, u32 index, u32 channel) {
    const u64 at = (static_cast<u64>(slot) * stage.projections + index) * stage.out_features + channel;
    return *reinterpret_cast<const float4*>(static_cast<const float*>(stage.out) + at);
}

__device__ __forceinline__ u32 arithmetic_of(const MoeArgs& args, i64 codebook) {
    return !args.identity ? HALF : codebook == MUL1 ? INTEGER : PAIR;
}

// Whose transformed rows a projection multiplies: gate's for both, where gate and up share suh and arithmetic.
__device__ __forceinline__ u32 rows_owner(const MoeArgs& args, const MoeStage& stage, u32 expert, u32 index) {
    if (index == 0) return 0;
    const Projection &own = projection_of(args, expert, stage.first + index), &other = projection_of(args, expert, stage.first);
    return own.suh == other.suh && arithmetic_of(args, own.codebook) == arithmetic_of(args, other.codebook) ? 0 : index;
}

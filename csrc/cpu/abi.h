// The library's C interface. All memory belongs to the caller, and no call keeps a pointer. A trellis lies at a
// multiple of four bytes, everything else at a multiple of its element's size.
//
// Every function returns 0, or a code that exl3_error_text explains. Dtypes: 0 float32, 1 float16,
// 2 bfloat16. Codebooks: 0 3INST, 1 mcg, 2 mul1. `half_bits` is 2·K. `threads` is an upper bound.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define EXL3_API extern "C" __declspec(dllexport)
#else
#define EXL3_API extern "C" __attribute__((visibility("default")))
#endif

// Raised whenever a function or a structure changes; the Python side refuses another number.
#define EXL3_ABI_VERSION 6

// One trellis of a fused layer (vllm_exl3.ops.shards.Shard). Shards lie back to back in the flat
// trellis (16·K int16 a tile), suh and svh.
struct exl3_shard {
    int64_t half_bits, codebook, in_features, out_features, crop_start, crop_size;
};

struct exl3_linear_call {
    const exl3_shard* shards;
    const uint16_t* trellis;
    const uint16_t* suh;  // fp16
    const uint16_t* svh;  // fp16
    const void* bias;     // [Σ crop_size], or null
    const void* x;        // [rows][x_stride], the first `columns` of each row are read; the stride may be 0
    void* y;              // [rows][y_stride], in x's dtype
    int64_t rows, columns, x_stride, y_stride;
    int32_t shard_count, dtype, bias_dtype, threads;
};

EXL3_API int exl3_abi_version(void);
EXL3_API const char* exl3_error_text(int code);

// Chooses the instruction set: "auto", "scalar", "neon", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_vbmi".
EXL3_API int exl3_select_isa(const char* name);
// The chosen one's name.
EXL3_API const char* exl3_isa(void);
// The address of GOMP_parallel in a runtime that the process already uses, or null.
EXL3_API void exl3_set_openmp(void* gomp_parallel);

// y = ((x·suh) H W H)·svh + bias for every shard, side by side.
EXL3_API int exl3_linear(const exl3_linear_call* call);

// The weights of the shards side by side, [in_features][stride]: as stored (rotated) or as used.
// All shards have the same in_features.
EXL3_API int exl3_dequantize(const exl3_shard* shards, int shard_count, const uint16_t* trellis, const uint16_t* suh,
                             const uint16_t* svh, int rotated, int dtype, void* out, int64_t stride, int threads);

// Rotates every 128 consecutive floats in place, scaled by 1/sqrt(128).
EXL3_API int exl3_hadamard(float* values, int64_t blocks, int threads);

// Encodes weights [rows][stride] (multiples of 128, rotated, scaled for the codebook) to a trellis
// [rows / 16][columns / 16][16·K]; *squared_error gets the sum of the squared errors.
EXL3_API int exl3_encode(const float* weights, int64_t stride, int64_t rows, int64_t columns, int half_bits,
                         int codebook, uint16_t* trellis, double* squared_error, int threads);

// Rows of a quantized table. Kinds: 0 int8, 1 int4, 2 EXL3 row code, 3 n-gram rows.
struct exl3_row_call {
    const void* table;       // [rows] of `width` bytes; ceil(width / 2) bytes; `groups` rings of 256; one ring of 160
    const void* scales;      // [rows][groups]; the same; fp16 signs [groups][256]; fp16 biases [groups][160]
    const int64_t* ids;      // [count], below 2^62
    const int64_t* index;    // [count], where in the table an n-gram row lies; null where that is its id, and for other kinds
    const int64_t* offsets;  // n-gram rows: the first row of each head, [groups]
    void* out;               // [count][width]
    int64_t count, rows, width, groups;
    int64_t first_row;  // n-gram rows: the row that id 0 stands for
    int32_t kind, bits, scale_dtype, dtype, threads;
};

EXL3_API int exl3_gather_rows(const exl3_row_call* call);

// Threads of the library's own and scratch memory, for calls of exl3_moe. Calls on one context wait for each other; calls on
// several run at the same time. It belongs to the process that made it: a fork cannot use it.
typedef struct exl3_context exl3_context;

// `threads` counts the calling thread. `cpus`, where not null, has the processor of each of the other threads - 1. A thread
// that waits spins for `spin_us` microseconds, then sleeps.
EXL3_API int exl3_context_create(int threads, const int32_t* cpus, int spin_us, exl3_context** context);
// No call may be running on it. Null is allowed. In a fork, its memory stays.
EXL3_API void exl3_context_destroy(exl3_context* context);

// One projection of one expert: a row of the table that vllm_exl3.ops.experts.pack_table makes. Offsets are in elements of
// the flat tensors; `bias` is -1 where there is none.
struct exl3_projection {
    int64_t trellis, suh, svh, bias, half_bits, codebook, in_features, out_features;
};

// The flat tensors of a projection of all experts, and how many elements each has.
struct exl3_flat {
    const uint16_t* trellis;
    const uint16_t* suh;  // fp16
    const uint16_t* svh;  // fp16
    const float* bias;    // or null
    int64_t trellis_size, suh_size, svh_size, bias_size;
};

// out[t] = Σ_k weights[t][k] · down(activation(gate(x[t]), up(x[t]))) of expert ids[t][k], in float32. Products of a choice
// are rounded, then added in the order of k, whatever experts they are of; numbers outside [0, experts) add nothing.
struct exl3_moe_call {
    const void* x;                 // [tokens][x_stride], the first `hidden` of each row are read
    const void* ids;               // [tokens][top_k], int32 or int64
    const float* weights;          // [tokens][top_k]
    void* out;                     // [tokens][out_stride]; with `slots` float32 [tokens][top_k][out_stride]
    const exl3_projection* table;  // [experts][projections]: gate, up and down, or up and down
    exl3_context* context;         // null: the threads of the process' OpenMP runtime, scratch memory of the calling thread
    exl3_flat w13, w2;
    int64_t tokens, hidden, intermediate, top_k, experts, x_stride, out_stride;
    float alpha, beta, limit;  // of the activation; a limit of infinity is none
    int32_t dtype, out_dtype, id_bytes, projections;
    int32_t activation;  // its place in vllm_exl3.ops.activation.ACTIVATIONS
    int32_t weight_on_input;  // multiply x by the weight in place of the expert's output
    int32_t slots;            // return the products themselves, not their sums; rows of numbers of no expert are not written
    int32_t threads;          // an upper bound, where there is no context
};

// The result does not depend on threads, nor a token's on other tokens. May be called from any thread.
EXL3_API int exl3_moe(const exl3_moe_call* call);
// Makes the context's scratch memory large enough for every call with these sizes, whatever it routes: pointers are not read
// but for the table. Later calls then allocate nothing.
EXL3_API int exl3_moe_reserve(const exl3_moe_call* call);
// Bytes of scratch memory that the context holds.
EXL3_API int64_t exl3_context_bytes(const exl3_context* context);

// Experts of a layer that the CPU computes while a GPU computes the others, as work of CUDA streams (csrc/cuda/share.cpp). All that this
// points to must stay as long as a stream, or a graph that was captured of it, may run it. No two may run at once on the same memory.
struct exl3_share {
    exl3_moe_call call;      // x, weights and out lie in pinned memory, packed; ids are `ids`; out is float32
    const void* routed_ids;  // pinned: [tokens][top_k] as the model routed them
    const int32_t* local;    // [local_size]: the call's number of each expert of the model; others for those that are not the call's
    int32_t* ids;            // [tokens][top_k], written by each run
    int64_t local_size, runs;
    int32_t routed_id_bytes;  // 4 or 8
    int32_t status;           // what exl3_moe returned for the last run that failed, whose reply is NaN; or 0
};

// The addresses of cuMemcpyAsync, cuLaunchHostFunc, cuEventRecord, cuStreamWaitEvent, cuCtxGetCurrent, cuCtxPushCurrent and
// cuCtxPopCurrent.
struct exl3_share_driver {
    int (*copy)(uint64_t target, uint64_t source, size_t bytes, void* stream);
    int (*host_function)(void* stream, void (*function)(void* data), void* data);
    int (*record)(void* event, void* stream);
    int (*wait)(void* stream, void* event, unsigned flags);
    int (*get_context)(void** context);
    int (*push_context)(void* context);
    int (*pop_context)(void** context);
};

struct exl3_share_launch {
    exl3_share* share;
    void* context;                     // CUcontext of the streams
    void *stream, *side;               // the side's work begins with what the stream holds so far
    void *ready, *done;                // events: recorded on the stream first, and on the side last
    uint64_t x, ids, weights, reply;   // device memory: the model's, packed, and float32 [tokens][hidden]
};

EXL3_API void exl3_set_share_driver(const exl3_share_driver* functions);
// Enqueues a run; the stream has to wait for `done` before it reads the reply. Returns the driver's status, or EXL3_BAD_PROGRAM.
EXL3_API int exl3_enqueue_share(const exl3_share_launch* launch);

// Launches of CUDA kernels (csrc/cuda). One structure of arguments serves all kernels of a program; what differs from call to call is
// written into a copy of it.
#define EXL3_ARGUMENT_BYTES 4096  // at most
#define EXL3_VALUE_COUNT 10       // x, out, trellis, suh, svh, bias, scratch, counters; strides of x and out in elements

// The eight bytes at `at` become the call's value of that number plus `addend`.
struct exl3_patch {
    uint32_t at, value;
    uint64_t addend;
};

struct exl3_kernel {
    void* function;  // CUfunction
    uint32_t grid_x, grid_y, threads, shared_bytes;
    uint32_t cluster;    // blocks in x of a thread block cluster; 1: none
    uint32_t dependent;  // whether it may start before the kernel ahead in the stream has finished
};

struct exl3_program {
    const void* arguments;
    const exl3_patch* patches;
    const exl3_kernel* kernels;
    void* context;  // CUcontext of the functions
    uint32_t argument_bytes, patch_count, kernel_count, padding;
};

// The addresses of cuLaunchKernelEx, cuCtxGetCurrent, cuCtxPushCurrent and cuCtxPopCurrent.
EXL3_API void exl3_set_driver(void* launch_kernel, void* get_context, void* push_context, void* pop_context);
// Launches a program's kernels one after the other. Returns the driver's status, which exl3_error_text does not know, or
// EXL3_BAD_PROGRAM, which it does: there is no driver, arguments or a patch go beyond what they may, or an address that
// is needed is null. A patch fills in eight bytes, whatever the field is declared as.
#define EXL3_BAD_PROGRAM (-1)
EXL3_API int exl3_launch(const exl3_program* program, uint64_t x, uint64_t out, uint64_t trellis, uint64_t suh,
                         uint64_t svh, uint64_t bias, uint64_t scratch, uint64_t counters, uint64_t x_stride,
                         uint64_t out_stride, void* stream);

// The library's C interface. All memory belongs to the caller, and no call keeps a pointer. A trellis lies at a
// multiple of four bytes, everything else at a multiple of its element's size.
//
// Every function returns 0, or a code that exl3_error_text explains. Dtypes: 0 float32, 1 float16,
// 2 bfloat16. Codebooks: 0 3INST, 1 mcg, 2 mul1. `half_bits` is 2·K. `threads` is an upper bound.
#pragma once

#include <stdint.h>

#if defined(_WIN32)
#define EXL3_API extern "C" __declspec(dllexport)
#else
#define EXL3_API extern "C" __attribute__((visibility("default")))
#endif

// Raised whenever a function or a structure changes; the Python side refuses another number.
#define EXL3_ABI_VERSION 4

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

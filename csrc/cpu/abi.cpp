#include "abi.h"

#include <new>

#include "../cuda/launch.h"
#include "decode.h"
#include "encode.h"
#include "format.h"
#include "isa.h"
#include "linear.h"
#include "parallel.h"
#include "rows.h"

namespace {

enum Error : int {
    OK = 0,
    BAD_SHARD = 1,
    BAD_DTYPE = 2,
    BAD_ISA = 3,
    NO_MEMORY = 4,
    BAD_ROWS = 5,
    BAD_ID = 6,
    BAD_SIZE = 7,
};

constexpr int64_t LAST_ID = int64_t(1) << 62;  // of a row, so that a sum of two does not overflow

bool valid(const exl3_shard& s) {
    const bool sizes = s.in_features > 0 && s.in_features % BLOCK == 0 && s.out_features > 0 &&
                       s.out_features % BLOCK == 0;
    const bool crop = s.crop_start >= 0 && s.crop_size >= 0 && s.crop_start <= s.out_features &&
                      s.crop_size <= s.out_features - s.crop_start;  // their sum may overflow
    return sizes && crop && known_rate(s.half_bits, s.codebook);
}

bool valid(const exl3_shard* shards, int count) {
    for (int i = 0; i < count; i++) {
        if (!valid(shards[i])) return false;
    }
    return count > 0;
}

bool known_dtype(int dtype) { return dtype >= exl3::FLOAT32 && dtype <= exl3::BFLOAT16; }

// Whether the widths, groups and ids of a call are those of one of the four kinds of rows.
bool valid(const exl3_row_call& call) {
    if (call.kind < exl3::INT8_ROWS || call.kind > exl3::NGRAM_ROWS) return false;
    if (call.count < 0 || call.width < 1 || call.groups < 1) return false;
    if (call.kind == exl3::INT8_ROWS) return call.groups == 1 && !call.index;
    if (call.kind == exl3::INT4_ROWS) return call.groups == (call.width - 1) / exl3::INTEGER_GROUP + 1 && !call.index;
    if (call.bits < 1 || call.bits > 8) return false;
    if (call.kind == exl3::CODED_ROWS) return (call.width - 1) / exl3::CODED_WIDTH < call.groups && !call.index;
    return call.width == exl3::NGRAM_WIDTH && call.first_row >= 0 && call.first_row <= LAST_ID;
}

// Runs a body that may run out of memory: no exception may cross the C interface.
template <class Body>
int guarded(Body&& body) {
    try {
        body();
        return OK;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

}  // namespace

int exl3_abi_version(void) { return EXL3_ABI_VERSION; }

const char* exl3_error_text(int code) {
    switch (code) {
        case OK: return "no error";
        case BAD_SHARD: return "a shard's bit rate, codebook, sizes or crop are not those of an EXL3 linear";
        case BAD_DTYPE: return "a dtype is none of float32, float16 and bfloat16";
        case BAD_ISA: return "this CPU does not run the instruction set asked for, or its name is unknown";
        case NO_MEMORY: return "out of memory";
        case BAD_ROWS: return "the kind, bits, width, groups or count are not those of the row codec";
        case BAD_ID: return "an id lies outside the table";
        case BAD_SIZE: return "a number of rows, columns or blocks is negative";
        case EXL3_BAD_PROGRAM: return "a program has too many arguments, a patch beyond them or of no value, or no driver";
        default: return "unknown error";
    }
}

int exl3_select_isa(const char* name) { return exl3::select_kernels(name) ? OK : BAD_ISA; }

const char* exl3_isa(void) { return exl3::kernels().name; }

void exl3_set_openmp(void* gomp_parallel) { exl3::set_openmp(gomp_parallel); }

int exl3_linear(const exl3_linear_call* call) {
    if (!valid(call->shards, call->shard_count)) return BAD_SHARD;
    if (!known_dtype(call->dtype) || (call->bias && !known_dtype(call->bias_dtype))) return BAD_DTYPE;
    if (call->rows < 0 || call->columns < 0) return BAD_SIZE;
    return guarded([&] { exl3::linear(exl3::kernels(), *call); });
}

int exl3_dequantize(const exl3_shard* shards, int shard_count, const uint16_t* trellis, const uint16_t* suh,
                    const uint16_t* svh, int rotated, int dtype, void* out, int64_t stride, int threads) {
    if (!valid(shards, shard_count)) return BAD_SHARD;
    for (int i = 1; i < shard_count; i++) {
        if (shards[i].in_features != shards[0].in_features) return BAD_SHARD;
    }
    if (!known_dtype(dtype)) return BAD_DTYPE;
    return guarded([&] {
        exl3::dequantize(exl3::kernels(), shards, shard_count, trellis, suh, svh, rotated != 0, dtype, out, stride,
                         threads);
    });
}

int exl3_hadamard(float* values, int64_t blocks, int threads) {
    constexpr int64_t piece = 256;
    if (blocks < 0) return BAD_SIZE;
    return guarded([&] {
        exl3::parallel_for((blocks + piece - 1) / piece, threads, [&](int64_t unit, int) {
            const int64_t first = unit * piece;
            exl3::kernels().hadamard(values + first * BLOCK, blocks - first < piece ? blocks - first : piece);
        });
    });
}

int exl3_encode(const float* weights, int64_t stride, int64_t rows, int64_t columns, int half_bits, int codebook,
                uint16_t* trellis, double* squared_error, int threads) {
    if (!valid({half_bits, codebook, rows, columns, 0, 0})) return BAD_SHARD;
    return guarded([&] {
        *squared_error =
            exl3::encode(exl3::kernels(), weights, stride, rows, columns, half_bits, codebook, trellis, threads);
    });
}

int exl3_gather_rows(const exl3_row_call* call) {
    if (!valid(*call)) return BAD_ROWS;
    const bool scaled = call->kind == exl3::INT8_ROWS || call->kind == exl3::INT4_ROWS;
    if (!known_dtype(call->dtype) || (scaled && !known_dtype(call->scale_dtype))) return BAD_DTYPE;
    const int64_t* places = call->index ? call->index : call->ids;
    for (int64_t i = 0; i < call->count; i++) {
        if (places[i] < 0 || places[i] >= call->rows) return BAD_ID;
        if (call->ids[i] < 0 || call->ids[i] > LAST_ID) return BAD_ID;
    }
    return guarded([&] { exl3::gather_rows(*call); });
}

void exl3_set_driver(void* launch_kernel, void* get_context, void* push_context, void* pop_context) {
    exl3::set_driver(launch_kernel, get_context, push_context, pop_context);
}

int exl3_launch(const exl3_program* program, uint64_t x, uint64_t out, uint64_t trellis, uint64_t suh, uint64_t svh,
                uint64_t bias, uint64_t scratch, uint64_t counters, uint64_t x_stride, uint64_t out_stride,
                void* stream) {
    const uint64_t values[EXL3_VALUE_COUNT] = {x,    out,     trellis,  suh,      svh,
                                               bias, scratch, counters, x_stride, out_stride};
    return exl3::launch(*program, values, stream);
}

#include "abi.h"

#include <algorithm>
#include <new>
#include <system_error>

#include "../cuda/launch.h"
#include "../cuda/share.h"
#include "decode.h"
#include "encode.h"
#include "format.h"
#include "isa.h"
#include "linear.h"
#include "moe.h"
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
    BAD_EXPERT = 8,
    BAD_ACTIVATION = 9,
    BAD_POINTER = 10,
    BAD_MOE_SIZE = 11,
    BAD_THREADS = 12,
    BAD_PROCESS = 13,
    BAD_MOE_DTYPE = 14,
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

int code_of(exl3::MoeFault fault) {
    switch (fault) {
        case exl3::MoeFault::NONE: return OK;
        case exl3::MoeFault::SIZE: return BAD_MOE_SIZE;
        case exl3::MoeFault::DTYPE: return BAD_MOE_DTYPE;
        case exl3::MoeFault::ACTIVATION: return BAD_ACTIVATION;
        case exl3::MoeFault::POINTER: return BAD_POINTER;
        default: return BAD_EXPERT;
    }
}

// Runs a body on a context, or on one of the calling thread that owns no threads.
template <class Body>
int with_context(exl3_context* context, Body&& body) {
    thread_local std::unique_ptr<exl3_context> own;
    if (context && !context->pool->usable()) return BAD_PROCESS;
    int code = OK;
    const int failure = guarded([&] {
        if (!context && !own) own.reset(new exl3_context);
        exl3_context& used = context ? *context : *own;
        const std::lock_guard<std::mutex> lock(used.busy);
        code = code_of(body(used));
    });
    return failure ? failure : code;
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
        case BAD_EXPERT:
            return "an expert's bit rate, codebook, sizes or offsets are not those of projections that lie in the flat "
                   "tensors and fit the layer";
        case BAD_ACTIVATION:
            return "an activation is none that the library knows, or takes another number of projections (3 with a gate, "
                   "2 without)";
        case BAD_POINTER: return "a pointer that the call needs is null";
        case BAD_MOE_SIZE:
            return "a number of tokens, channels, choices or experts, or a stride, is negative or beyond what a layer has";
        case BAD_THREADS:
            return "a context needs 1 to 1024 threads and a spin of at most a second, and the system starts no so many, or "
                   "has no such processor";
        case BAD_PROCESS: return "a context was made by another process: make one in this, after the fork";
        case BAD_MOE_DTYPE:
            return "a dtype is none of float32, float16 and bfloat16, ids are not of 4 or 8 bytes, or rows of slots not "
                   "of float32";
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

int exl3_context_create(int threads, const int32_t* cpus, int spin_us, exl3_context** context) {
    if (!context) return BAD_POINTER;
    *context = nullptr;
    if (threads < 1 || threads > exl3::MOST_THREADS || spin_us < 0 || spin_us > 1000000) return BAD_THREADS;
    try {
        std::unique_ptr<exl3_context> made(new exl3_context);
        made->spin = std::chrono::microseconds(spin_us);
        made->pool.reset(new exl3::Pool(threads, cpus, made->spin));
        *context = made.release();
        return OK;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    } catch (const std::system_error&) {
        return BAD_THREADS;
    }
}

void exl3_context_destroy(exl3_context* context) {
    // In a fork its threads, which are not there, still count as sleepers, and destruction would wait for them.
    if (context && context->pool->usable()) delete context;
}

int64_t exl3_context_bytes(const exl3_context* context) { return context ? int64_t(context->scratch.size()) : 0; }

int exl3_moe(const exl3_moe_call* call) {
    if (!call) return BAD_POINTER;
    if (const int code = code_of(exl3::check_call(*call))) return code;
    return with_context(call->context, [&](exl3_context& context) {
        return exl3::run_experts(exl3::kernels(), *call, context);
    });
}

int exl3_moe_reserve(const exl3_moe_call* call) {
    if (!call || !call->context) return BAD_POINTER;
    exl3_moe_call sizes = *call;
    sizes.tokens = 0;  // what tokens need beside the table, such as ids, need not be there yet
    if (const int code = code_of(exl3::check_call(sizes))) return code;
    if (call->tokens < 0) return BAD_MOE_SIZE;  // any other number only bounds a part's
    return with_context(call->context, [&](exl3_context& context) {
        exl3::MoeFault fault = exl3::MoeFault::NONE;
        const size_t bytes = exl3::most_scratch(exl3::kernels(), *call, context, fault);
        if (fault == exl3::MoeFault::NONE) context.scratch.reserve(bytes);
        return fault;
    });
}

void exl3_set_driver(void* launch_kernel, void* get_context, void* push_context, void* pop_context) {
    exl3::set_driver(launch_kernel, get_context, push_context, pop_context);
}

void exl3_set_share_driver(const exl3_share_driver* functions) { exl3::set_share_driver(*functions); }

int exl3_enqueue_share(const exl3_share_launch* launch) { return exl3::enqueue_share(*launch); }

int exl3_launch(const exl3_program* program, uint64_t x, uint64_t out, uint64_t trellis, uint64_t suh, uint64_t svh,
                uint64_t bias, uint64_t scratch, uint64_t counters, uint64_t x_stride, uint64_t out_stride,
                void* stream) {
    const uint64_t values[EXL3_VALUE_COUNT] = {x,    out,     trellis,  suh,      svh,
                                               bias, scratch, counters, x_stride, out_stride};
    return exl3::launch(*program, values, stream);
}

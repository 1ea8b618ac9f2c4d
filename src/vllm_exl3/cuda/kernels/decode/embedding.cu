// Rows of quantized tables, gathered and decoded: int8 and int4 integers, EXL3 row codes, n-gram rows.
//
// The caller defines INSTANCE_KIND, and INSTANCE_BITS (of the ring kinds) or INSTANCE_VECTOR (columns a thread of the
// integer kinds handles, 8 or 1). Tables may lie in host memory that the device reads. A row outside the table is zeros.
#include "decode/row_code.cuh"

enum Kind : int { INT8_ROWS = 0, INT4_ROWS = 1, CODED_ROWS = 2, NGRAM_ROWS = 3 };

struct EmbeddingArgs {
    const void* ids;     // [count] int64, or int32 where narrow_ids
    const i64* index;    // [count], the row of each id in the table; null where that is the id (n-gram rows only)
    const void* table;   // [rows][row_words]
    const void* scales;  // integers: [rows][groups]; row codes: fp16 signs [groups][256]; n-gram rows: fp16 biases [heads][160]
    const i64* offsets;  // n-gram rows: the first row of each head [heads]
    void* out;           // [count][width]
    i64 count, rows, first_row;
    u32 width, groups, heads, narrow_ids, scale_type, out_type;
};

constexpr int EMBEDDING_THREADS = 128;
constexpr int INTEGER_GROUP = 128;  // columns of int4 that share a scale

__device__ __forceinline__ i64 row_id(const EmbeddingArgs& args, i64 i) {
    return args.narrow_ids ? i64(static_cast<const int*>(args.ids)[i]) : static_cast<const i64*>(args.ids)[i];
}

__device__ __forceinline__ u32 packed_pair(float low, float high, u32 type) {
    return type == F16 ? float_to_half(low) | u32(float_to_half(high)) << 16
                       : float_to_bfloat(low) | u32(float_to_bfloat(high)) << 16;
}

// Eight values to eight columns from `at`, a multiple of 8, on.
__device__ __forceinline__ void store_eight(void* out, i64 at, u32 type, const float (&v)[8]) {
    if (type == F32) {
        float4* target = reinterpret_cast<float4*>(static_cast<float*>(out) + at);
        target[0] = make_float4(v[0], v[1], v[2], v[3]);
        target[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        *reinterpret_cast<uint4*>(static_cast<u16*>(out) + at) =
            make_uint4(packed_pair(v[0], v[1], type), packed_pair(v[2], v[3], type), packed_pair(v[4], v[5], type),
                       packed_pair(v[6], v[7], type));
    }
}

// Grid (rows, parts of a row).
template <int KIND, int VECTOR>
__device__ __forceinline__ void gather_integers(const EmbeddingArgs& args) {
    constexpr bool wide = VECTOR == 8;
    const u32 column = (blockIdx.y * EMBEDDING_THREADS + threadIdx.x) * VECTOR;
    if (column >= args.width) return;
    const i64 row = blockIdx.x, id = row_id(args, row), at = row * args.width + column;
    float v[VECTOR] = {};
    if (id >= 0 && id < args.rows) {
        if constexpr (KIND == INT8_ROWS) {
            const float scale = load_element(args.scales, id, args.scale_type);
            const signed char* source = static_cast<const signed char*>(args.table) + id * args.width + column;
            if constexpr (wide) {
                const uint2 bytes = __ldg(reinterpret_cast<const uint2*>(source));
#pragma unroll
                for (int i = 0; i < 8; ++i) v[i] = float(int((i < 4 ? bytes.x : bytes.y) << (24 - 8 * (i & 3))) >> 24) * scale;
            } else {
                v[0] = float(int(__ldg(source))) * scale;
            }
        } else {
            const float scale = load_element(args.scales, id * args.groups + column / INTEGER_GROUP, args.scale_type);
            const u8* source = static_cast<const u8*>(args.table) + id * ((args.width + 1) / 2) + column / 2;
            if constexpr (wide) {
                const u32 halves = __ldg(reinterpret_cast<const u32*>(source));
#pragma unroll
                for (int i = 0; i < 8; ++i) v[i] = float(int(halves >> (4 * i) & 15u) - 8) * scale;
            } else {
                v[0] = float(int(__ldg(source) >> (4 * (column & 1)) & 15u) - 8) * scale;
            }
        }
    }
    if constexpr (wide) store_eight(args.out, at, args.out_type, v);
    else store_element(args.out, at, args.out_type, v[0]);
}

// H256/16 of a warp's values, eight consecutive ones a lane; the same sums in the same order as the reference.
__device__ __forceinline__ void hadamard256(float (&v)[8], int lane) {
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i & step) continue;
            const float a = v[i], b = v[i | step];
            v[i] = a + b;
            v[i | step] = a - b;
        }
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xffffffffu, v[i], step));
    }
}

// Grid (rows, parts of a row), one warp a ring.
template <int BITS>
__device__ __forceinline__ void gather_coded(const EmbeddingArgs& args) {
    using R = Ring<256, BITS>;
    __shared__ u32 staging[EMBEDDING_THREADS / 32][R::staged];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const u32 group = blockIdx.y * (EMBEDDING_THREADS / 32) + warp;
    if (group >= args.groups) return;
    const i64 row = blockIdx.x, id = row_id(args, row);
    const u32 column = group * 256 + 8 * lane;
    const i64 at = row * args.width + column;
    float v[8] = {};
    if (id >= 0 && id < args.rows) {
        const u16* table = static_cast<const u16*>(args.table);
        int odd;
        const float scale = stage_ring<256, BITS>(table + (id * args.groups + group) * R::words,
                                                           table + args.rows * args.groups * R::words, staging[warp], lane, odd);
        decode_ring<256, BITS>(v, staging[warp], odd, scale, 8 * lane);
        hadamard256(v, lane);
        const uint4 packed = __ldg(static_cast<const uint4*>(args.scales) + group * 32 + lane);
        const u32 signs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
        for (int i = 0; i < 8; ++i)  // rounded to fp16 first, as the format has it
            v[i] = half_to_float(float_to_half(v[i] * 0.0625f * half_to_float(u16(signs[i / 2] >> (16 * (i & 1))))));
    }
    if (column + 8 <= args.width && args.width % 8 == 0) {
        store_eight(args.out, at, args.out_type, v);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (column + i < args.width) store_element(args.out, at + i, args.out_type, v[i]);
    }
}

// The head that owns a row: the last whose first row is not behind it.
__device__ __forceinline__ u32 head_of(const EmbeddingArgs& args, i64 id, int lane) {
    u32 before = 0;
    for (u32 first = 0; first < args.heads; first += 32) {
        const bool own = first + lane < args.heads && __ldg(args.offsets + first + lane) <= id;
        before += __popc(__ballot_sync(0xffffffffu, own));
    }
    return before ? before - 1 : 0;
}

// One warp a row.
template <int BITS>
__device__ __forceinline__ void gather_ngram(const EmbeddingArgs& args) {
    using R = Ring<160, BITS>;
    __shared__ u32 staging[EMBEDDING_THREADS / 32][R::staged];
    __shared__ float decoded[EMBEDDING_THREADS / 32][160];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const i64 item = i64(blockIdx.x) * (EMBEDDING_THREADS / 32) + warp;
    if (item >= args.count) return;
    const i64 id = row_id(args, item), place = args.index == nullptr ? id : args.index[item];
    const bool inside = place >= 0 && place < args.rows;
    const u16* bias = static_cast<const u16*>(args.scales) + head_of(args, id + args.first_row, lane) * 160;
    if (inside) {
        const u16* table = static_cast<const u16*>(args.table);
        int odd;
        const float scale =
            stage_ring<160, BITS>(table + place * R::words, table + args.rows * R::words, staging[warp], lane, odd);
        float v[5];
        decode_ring<160, BITS>(v, staging[warp], odd, scale, 5 * lane);
#pragma unroll
        for (int i = 0; i < 5; ++i) decoded[warp][5 * lane + i] = v[i];
    }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 160; i += 32) {
        const float value = inside ? decoded[warp][i] + half_to_float(__ldg(bias + i)) : 0.0f;
        store_element(args.out, item * 160 + i, args.out_type, half_to_float(float_to_half(value)));
    }
}

extern "C" __global__ void __launch_bounds__(EMBEDDING_THREADS) exl3_embedding(const __grid_constant__ EmbeddingArgs args) {
#if INSTANCE_KIND <= 1
    gather_integers<INSTANCE_KIND, INSTANCE_VECTOR>(args);
#elif INSTANCE_KIND == 2
    gather_coded<INSTANCE_BITS>(args);
#else
    gather_ngram<INSTANCE_BITS>(args);
#endif
}

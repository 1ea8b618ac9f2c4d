// The GEMM's B operand: a block keeps what its own items multiply in shared memory. It rotates that by itself, or loads what
// narrow_rotate.cu wrote in the same way.
//
// An item's activations of one token are H(x·suh)/sqrt(128) with a scale of their own, so rotating needs no other channels:
//   INTEGER:    a15 = round(A·16256/max|A|), stored as 128·high + low, both in int8, two planes a token;
//   PAIR, HALF: fp16 of A·2^e with 2^10 <= max|A|·2^e < 2^11.
// What decoding leaves out of a weight (codebook.cuh) is added back through the initial value of the item's sums.
#pragma once
#include "fragments.cuh"
#include "hadamard.cuh"
#include "launch.cuh"
#include "narrow_problem.cuh"

constexpr float LARGEST_INTEGER = 16256.0f;  // 127·128
constexpr float MUL1_SCALE = 1774.0f / (1 << 18);
constexpr float MUL1_OFFSET = -905216.0f / 1774.0f;  // w = MUL1_SCALE·(B + MUL1_OFFSET), B the sum of four bytes

// An item's record in shared memory. Operands are words [unit of 64 k][quad][token plane][k-tile][4]; a lane reads quads of its
// (plane, k-tile). Then where sums begin, 16 bytes a token (INTEGER: high, low, high, low) or pair of tokens, as an MMA's C operand
// wants them; then the factor of every token that undoes its scale. Tokens that do not exist are never written: what is there ends
// in columns that nobody reads.
template <int ARITHMETIC, int TILE_ROWS>
struct Record {
    static constexpr u32 tokens = ARITHMETIC == INTEGER || TILE_ROWS >= 8 ? TILE_ROWS : 8;
    static constexpr u32 planes = (ARITHMETIC == INTEGER ? 2 : 1) * tokens;
    static constexpr u32 quads = ARITHMETIC == HALF ? 2 : 4;
    static constexpr u32 quad_bytes = planes * 64, unit_bytes = quads * quad_bytes;
    static constexpr u32 starts_at = 2 * unit_bytes, undo_at = starts_at + 8 * planes;
    static constexpr u32 bytes = undo_at + (4 * tokens + 15) / 16 * 16;
};

// A lane's four values, channels 4·lane .. 4·lane+3 of a token's block, as they lie in memory.
struct Raw {
    uint2 x, suh;
};

// Whether x can be read 8 bytes at a time.
__device__ __forceinline__ bool reads_whole(const NarrowArgs& args) {
    return args.x_type != F32 && (args.in_width | args.x_stride) % 4 == 0 && reinterpret_cast<u64>(args.x) % 8 == 0;
}

__device__ __forceinline__ Raw load_raw(const NarrowArgs& args, const NarrowShard& shard, u32 row, u32 block, bool whole, int lane) {
    const u32 column = block * BLOCK + 4 * lane;
    Raw raw{{0, 0}, *reinterpret_cast<const uint2*>(shard.suh + column)};
    if (whole && column < args.in_width)
        raw.x = *reinterpret_cast<const uint2*>(static_cast<const u16*>(args.x) + row * args.x_stride + column);
    return raw;
}

// x·suh, rotated, unscaled.
__device__ __forceinline__ void rotate_raw(float (&v)[4], const Raw& raw, const NarrowArgs& args, u32 row, u32 block, bool whole, int lane) {
    const u16 bits[4] = {u16(raw.x.x), u16(raw.x.x >> 16), u16(raw.x.y), u16(raw.x.y >> 16)};
    const u16 suh[4] = {u16(raw.suh.x), u16(raw.suh.x >> 16), u16(raw.suh.y), u16(raw.suh.y >> 16)};
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = args.x_type == F16 ? half_to_float(bits[i]) : __uint_as_float(u32(bits[i]) << 16);
    if (!whole) {
        const u32 column = block * BLOCK + 4 * lane;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            v[i] = column + i < args.in_width ? load_element(args.x, row * args.x_stride + column + i, args.x_type) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= half_to_float(suh[i]);
    hadamard128(v, lane);
}

// The bits of the largest magnitude in a warp's values. Bits of magnitudes order as the magnitudes do, and a NaN's are above
// all, so that its row comes out as NaN and not as something plausible.
__device__ __forceinline__ float largest_magnitude(const float (&v)[4]) {
    const u32 bits = max(max(__float_as_uint(fabsf(v[0])), __float_as_uint(fabsf(v[1]))),
                         max(__float_as_uint(fabsf(v[2])), __float_as_uint(fabsf(v[3]))));
    return __uint_as_float(__reduce_max_sync(0xffffffffu, bits));
}

struct Scale {
    float factor;  // from unscaled H(x·suh) to what is multiplied
    float undo;    // from the products' sum to y before the output Hadamard
};

__device__ __forceinline__ Scale scale_of(u32 arithmetic, float largest) {
    if (arithmetic == INTEGER) {
        const float factor = LARGEST_INTEGER / largest;
        if (!(factor <= 3.0e38f) && largest <= 1.0f) return {0.0f, 0.0f};  // zeros, or below 2^-113
        return {factor, largest * (HADAMARD_SCALE * MUL1_SCALE / LARGEST_INTEGER)};  // infinity and NaN: 0·undo is NaN
    }
    // 2^exponent <= largest·HADAMARD_SCALE, as float bits; the factor is 2^(10-exponent) and stays a normal number.
    const u32 exponent = __float_as_uint(largest * HADAMARD_SCALE) >> 23 & 0xffu;
    const u32 up = min(264u - max(exponent, 11u), 253u);
    const float undo = __uint_as_float((254u - up) << 23);
    return {__uint_as_float(up << 23) * HADAMARD_SCALE, largest <= 3.0e38f ? undo : largest * 1.0e30f};
}

__device__ __forceinline__ void store_shared(u32 address, u32 word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
__device__ __forceinline__ void store_shared(u32 address, u32 first, u32 second) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second) : "memory");
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

// Quantises a lane's values of one token and writes them to the item's record.
template <class K>
__device__ __forceinline__ void store_item(const float (&v)[4], u32 record, u32 token, int lane) {
    using R = Record<K::arithmetic, K::tile_rows>;
    const Scale scale = scale_of(K::arithmetic, largest_magnitude(v));
    const u32 q = lane >> 2 & 3, first = lane & 3;  // k-tile; the lane's k are 4·first .. 4·first+3 of it
    const u32 unit = record + (lane >> 4) * R::unit_bytes + q * 16;
    // k = 2i + 8h + b of the tile is word 2h + b of quad i, in HALF half b of word 2·(i & 1) + h of quad i / 2.
    const u32 h = first >> 1, quad = 2 * (first & 1);
    if (lane == 0)
        store_shared(record + R::undo_at + 4 * token, __float_as_uint(K::byte_sums ? scale.undo * MUL1_SCALE : scale.undo));
    if constexpr (K::arithmetic == INTEGER) {
        int low[4], high[4], low_sum = 0, high_sum = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int a = __float2int_rn(v[i] * scale.factor);
            high[i] = (a + 64) >> 7, low[i] = a - 128 * high[i];
            high_sum += high[i], low_sum += low[i];
        }
        const u32 plane = unit + 2 * token * 64 + 8 * h;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 at = plane + (quad + i) * R::quad_bytes;
            store_shared(at, (u32(high[2 * i]) & 0xffu) * 0x01010101u, (u32(high[2 * i + 1]) & 0xffu) * 0x01010101u);
            store_shared(at + 64, (u32(low[2 * i]) & 0xffu) * 0x01010101u, (u32(low[2 * i + 1]) & 0xffu) * 0x01010101u);
        }
        high_sum = __reduce_add_sync(0xffffffffu, high_sum), low_sum = __reduce_add_sync(0xffffffffu, low_sum);
        // -510 of the offset on either plane, the rest of it, rounded, on the low one: half a unit of 10^7 is lost.
        const float rest = static_cast<float>(128 * high_sum + low_sum) * (MUL1_OFFSET + 510.0f);
        if (lane < 2)
            store_shared(record + R::starts_at + 16 * token + 8 * lane, -510 * high_sum, -510 * low_sum + __float2int_rn(rest));
    } else {
        u16 a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = float_to_half(v[i] * scale.factor);
        const u32 plane = unit + token * 64;
        if constexpr (K::arithmetic == PAIR) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                store_shared(plane + 8 * h + (quad + i) * R::quad_bytes, a[2 * i] * 0x10001u, a[2 * i + 1] * 0x10001u);
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                store_shared(plane + quad / 2 * R::quad_bytes + 4 * h + 8 * i, a[2 * i] | u32(a[2 * i + 1]) << 16);
        }
        float start = 0.0f;
        if constexpr (K::byte_sums)
            start = warp_sum((half_to_float(a[0]) + half_to_float(a[1])) + (half_to_float(a[2]) + half_to_float(a[3]))) *
                (MUL1_OFFSET - 1024.0f);
        if (lane < 2) store_shared(record + R::starts_at + token / 2 * 16 + token % 2 * 4 + 8 * lane, __float_as_uint(start));
    }
}

// (item, token) pairs in the order of items, every 16th for a warp.
struct Turn {
    u32 item, token, rows;

    __device__ __forceinline__ Turn(u32 warp, u32 rows) : item(warp / rows), token(warp % rows), rows(rows) {}
    __device__ __forceinline__ void next() {
        item += WARPS / rows, token += WARPS % rows;
        if (token >= rows) token -= rows, ++item;
    }
};

// Rotates what the items [begin, end) of one shard multiply. All threads of the block call it.
template <class K, u32 RECORD_BYTES>
__device__ __forceinline__ void rotate_items(u32 records, const NarrowArgs& args, const NarrowShard& shard, u32 begin, u32 end, u32 warp,
                                             int lane) {
    constexpr int AT_ONCE = 4;  // loads that overlap
    const u32 depth = shard.in_features / BLOCK, first_row = blockIdx.y * K::tile_rows;
    const u32 rows = min(static_cast<u32>(K::tile_rows), args.rows - first_row), count = end - begin;
    const u32 first_block = (begin - shard.first_item) % depth;
    const bool whole = reads_whole(args);
    const auto block_of = [&](u32 item) {
        u32 block = first_block + item;
        while (block >= depth) block -= depth;
        return block;
    };
    Turn loading(warp, rows), storing(warp, rows);
    while (storing.item < count) {
        Raw raw[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (loading.item < count) raw[i] = load_raw(args, shard, first_row + loading.token, block_of(loading.item), whole, lane);
            loading.next();
        }
#pragma unroll 1  // the code runs once or twice a launch: its size is what it costs
        for (int i = 0; i < AT_ONCE && storing.item < count; ++i) {
            float v[4];
            rotate_raw(v, raw[0], args, first_row + storing.token, block_of(storing.item), whole, lane);
            store_item<K>(v, records + storing.item * RECORD_BYTES, storing.token, lane);
            storing.next();
#pragma unroll
            for (int j = 1; j < AT_ONCE; ++j) raw[j - 1] = raw[j];
        }
    }
}

// The same from what the rotating kernel wrote.
template <u32 RECORD_BYTES>
__device__ __forceinline__ void load_items(u8* records, const NarrowArgs& args, const NarrowShard& shard, u32 begin, u32 end) {
    constexpr u32 chunks = RECORD_BYTES / 16;
    const u32 depth = shard.in_features / BLOCK, first_block = (begin - shard.first_item) % depth;
    const uint4* source = args.records + (static_cast<u64>(blockIdx.y) * args.total_records + shard.first_record) * chunks;
    uint4* target = reinterpret_cast<uint4*>(records);
#pragma unroll 4
    for (u32 chunk = threadIdx.x; chunk < (end - begin) * chunks; chunk += THREADS) {
        u32 block = first_block + chunk / chunks;
        while (block >= depth) block -= depth;
        target[chunk] = __ldcg(source + block * chunks + chunk % chunks);
    }
}

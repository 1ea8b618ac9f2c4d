// Rotated activations of one token and k block into the k block's record, with a scale of their own.
#pragma once
#include "base/hadamard.cuh"
#include "narrow/record.cuh"
#include "narrow/pipeline.cuh"

template <class K> constexpr int LANES = K::arithmetic == HALF ? 8 : 16;  // of a rotation
template <class K> using Values = float[HADAMARD_SIZE / LANES<K>];          // of a lane, in vectors of eight as hadamard128_part has them

// Where a rotation reads and writes.
struct Rotation {
    u32 row, block, token, record;  // row of x, Hadamard block of k, token of the tile, its record's shared address
};

// The bits of the largest magnitude of a rotation's values. Bits of magnitudes order as the magnitudes do, and a NaN's are above
// all, so that its row comes out as NaN and not as something plausible.
template <int LANES, int VALUES>
__device__ __forceinline__ float largest_magnitude(const float (&v)[VALUES]) {
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) bits = max(bits, __float_as_uint(fabsf(v[i])));
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, step));
    return __uint_as_float(bits);
}

template <int LANES, class Number>
__device__ __forceinline__ Number sum_of_lanes(Number value) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

__device__ __forceinline__ void store_shared(u32 address, u32 word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
__device__ __forceinline__ void store_shared(u32 address, u32 first, u32 second) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second) : "memory");
}
__device__ __forceinline__ void store_shared(u32 address, u32 first, u32 second, u32 third, u32 fourth) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(first), "r"(second), "r"(third), "r"(fourth) : "memory");
}

// A lane's part of a token of 15-bit integers, stored as 128·high + low in two planes of bytes.
template <class R>
struct TwoPlanes {
    int high_sum = 0, low_sum = 0;

    // Two neighbours of k; `place` is that of their high bytes.
    __device__ __forceinline__ void store(u32 place, float first, float second, float factor) {
        const float v[2] = {first, second};
        u32 high[2], low[2];
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const int a = __float2int_rn(v[b] * factor), most = (a + 64) >> 7, rest = a - 128 * most;
            high_sum += most, low_sum += rest;
            high[b] = __byte_perm(most, 0, 0), low[b] = __byte_perm(rest, 0, 0);
        }
        store_shared(place, high[0], high[1]);
        store_shared(place + 64, low[0], low[1]);
    }
    // The start of products and the scale of their sums, once the sums are those of all lanes: -510 of the offset on either
    // plane, the rest of it, rounded, on the low one: half a unit of 10^7 is lost.
    __device__ __forceinline__ void end(u32 token, float descale, bool stores) const {
        const float rest = static_cast<float>(128 * high_sum + low_sum) * (MUL1_OFFSET + 510.0f);
        const u32 high_start = -510 * high_sum, low_start = -510 * low_sum + __float2int_rn(rest);
        if (stores) {
            store_shared(token + R::start_at, high_start, low_start, high_start, low_start);
            store_shared(token + R::descale_at, __float_as_uint(descale));
        }
    }
};

// Quantises a lane's values of one token and writes them to the k block's record.
template <class K>
__device__ __forceinline__ void store_rotated(const Values<K>& v, const Rotation& at, int lane) {
    using R = Record<K::arithmetic, K::tile_rows>;
    constexpr int lanes = LANES<K>, words = HADAMARD_SIZE / lanes / 2;
    const Scale scale = scale_of(K::arithmetic, largest_magnitude<lanes>(v));
    const float descale = K::byte_sums ? scale.descale * MUL1_SCALE : scale.descale;
    // A vector of eight is k = 8h .. 8h + 7 of k-tile q of 64 k. k = 2i + 8h + b is word 2h + b of quad i, in HALF half b of word
    // 2·(i & 1) + h of quad i / 2.
    const u32 q = lane >> 1 & 3, h = lane & 1;
    const u32 k_half = lanes == 16 ? lane >> 3 & 1 : 0;  // of the first vector; a second one belongs to the next
    const bool first = lane % lanes == 0;
    if constexpr (K::arithmetic == INTEGER) {
        const u32 to = at.record + at.token * R::token_bytes + q * 16 + 8 * h;
        TwoPlanes<R> planes;
#pragma unroll
        for (int i = 0; i < words; ++i)
            planes.store(to + (k_half + i / 4) * R::k_half_bytes + i % 4 * R::quad_bytes, v[2 * i], v[2 * i + 1], scale.factor);
        planes.high_sum = sum_of_lanes<lanes>(planes.high_sum), planes.low_sum = sum_of_lanes<lanes>(planes.low_sum);
        planes.end(at.record + at.token * R::token_bytes, descale, first);
    } else if constexpr (K::arithmetic == BYTE) {
        const u32 token = at.record + at.token * R::token_bytes;
        int sum = 0;
#pragma unroll
        for (int i = 0; i < words; ++i) {
            const int a = __float2int_rn(v[2 * i] * scale.factor), b = __float2int_rn(v[2 * i + 1] * scale.factor);
            sum += a + b;
            store_shared(token + (k_half + i / 4) * R::k_half_bytes + i % 4 * R::quad_bytes + q * 16 + 8 * h, __byte_perm(a, 0, 0), __byte_perm(b, 0, 0));
        }
        const float start = static_cast<float>(sum_of_lanes<lanes>(sum)) * MUL1_OFFSET;
        if (first) store_shared(token + R::start_at, __float2int_rn(start), __float_as_uint(descale));
    } else {
        u32 pairs[words];  // as two fp16
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < words; ++i) {
            const u16 a = float_to_half(v[2 * i] * scale.factor), b = float_to_half(v[2 * i + 1] * scale.factor);
            if constexpr (K::byte_sums) sum += half_to_float(a) + half_to_float(b);
            pairs[i] = a | u32(b) << 16;
        }
        if constexpr (K::byte_sums) sum = sum_of_lanes<lanes>(sum) * (MUL1_OFFSET - 1024.0f);
        if constexpr (WARPGROUPS && K::arithmetic == HALF) {
            const u32 to = at.record + h * R::matrix_pitch + at.token * 16 + 4 * q;
#pragma unroll
            for (int i = 0; i < words; ++i) store_shared(to + (k_half + i / 4) * R::k_half_bytes + i % 4 * 2 * R::matrix_pitch, pairs[i]);
            const u32 descales = at.record + R::descale_at + 4 * at.token;
            if (first) {
                store_shared(descales, __float_as_uint(descale));
                if constexpr (K::byte_sums) store_shared(descales + 4 * R::tokens, __float_as_uint(sum * descale));
            }
        } else {
            const u32 token = at.record + at.token * R::token_bytes;
#pragma unroll
            for (int i = 0; i < words; ++i) {
                const u32 to = token + (k_half + i / 4) * R::k_half_bytes + q * 16;
                if constexpr (K::arithmetic == PAIR)
                    store_shared(to + i % 4 * R::quad_bytes + 8 * h, __byte_perm(pairs[i], 0, 0x1010), __byte_perm(pairs[i], 0, 0x3232));
                else store_shared(to + i % 4 / 2 * R::quad_bytes + 8 * (i % 2) + 4 * h, pairs[i]);
            }
            if (first) {
                store_shared(token + R::start_at, __float_as_uint(sum));
                store_shared(token + R::descale_at, __float_as_uint(descale));
            }
        }
    }
}

// One k block of one warp: decoded weights times the cached activations, into sums that begin where LaneTokens says.
#pragma once
#include "narrow/activations.cuh"
#include "narrow/pipeline.cuh"
#include "narrow/product_words.cuh"

template <class K> using KBlockSum = typename Sum<K::arithmetic>::type;
template <class K> constexpr bool INTEGRAL = K::arithmetic == INTEGER || K::arithmetic == BYTE;

// The B operand of 64 k: lane (g, q) has token plane g of k-tile q. Kept in registers for all tiles, or, where two groups
// of columns leave none to spare, read again for every two products.
template <class K>
struct Operand {
    static constexpr bool cached = K::columns == 1;
    static constexpr int quads = cached ? K::matrices / 4 : 1;
    u32 from;  // the lane's first word
    u32 b[K::columns][4 * quads];

    explicit __device__ __forceinline__ Operand(u32 from) : from(from) {
        if constexpr (cached) load<0>();
    }
    // Makes sure of the words of product P.
    template <int P>
    __device__ __forceinline__ void need() {
        if constexpr (!cached && P % 2 == 0) load<P / 2>();
    }
    template <int P>
    __device__ __forceinline__ u32 word(int group, int i) const { return b[group][2 * (cached ? P : P % 2) + i]; }

private:
    template <int FIRST>
    __device__ __forceinline__ void load() {
        using R = Record<K::arithmetic, K::tile_rows>;
#pragma unroll
        for (int group = 0; group < K::columns; ++group) {
#pragma unroll
            for (int quad = 0; quad < quads; ++quad) {
                u32(&words)[4] = *reinterpret_cast<u32(*)[4]>(&b[group][4 * quad]);
                SharedWords{from + group * R::group * R::token_bytes + (FIRST + quad) * R::quad_bytes}.run(words, 0);
            }
        }
    }
};

// The two fp16 of a word, added: where both come from one register the sum takes its halves without a permutation.
__device__ __forceinline__ u16 half_sum(u32 word) {
    u16 low, high, sum;
    asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(word));
    asm("add.rn.f16 %0, %1, %2;" : "=h"(sum) : "h"(low), "h"(high));
    return sum;
}
__device__ __forceinline__ u32 pack_halves(u16 low, u16 high) {
    u32 word;
    asm("mov.b32 %0, {%1, %2};" : "=r"(word) : "h"(low), "h"(high));
    return word;
}

// Two product words to two fp16 weights, or byte sums where the offset is accounted for elsewhere.
template <class K>
__device__ __forceinline__ u32 weights_of(u32 x, u32 y) {
    if constexpr (K::byte_sums) return byte_sums(x, y);
    else return pack_halves(half_sum(x), half_sum(y));
}

// Product P of a half of k, on top of `start`.
template <class K, int P>
__device__ __forceinline__ void multiply_product(KBlockSum<K> (&sums)[K::columns][4], const KBlockSum<K> (&start)[K::columns][4],
                                                 const u32 (&a)[4], Operand<K>& operand) {
    operand.template need<P>();
#pragma unroll
    for (int group = 0; group < K::columns; ++group) {
        const u32 first = operand.template word<P>(group, 0), second = operand.template word<P>(group, 1);
        if constexpr (INTEGRAL<K>) mma_integer(sums[group], a, first, second, start[group]);
        else mma_half(sums[group], a, first, second, start[group]);
    }
}

// A step is a half of k of one tile column, 64 k × 16 output channels: its products' A operands.
template <class K> constexpr int PRODUCTS = K::arithmetic == HALF ? 4 : 8;
template <class K> using Step = u32[PRODUCTS<K>][4];

// The operands of the products that take the eight positions from 8·I on: one of HALF, two of the others.
template <class K, int I>
__device__ __forceinline__ void decode_products(Step<K>& a, const u32 (&words)[K::Window::words]) {
    u32 x[8];
    eight_words<K, I>(x, words);
    if constexpr (K::arithmetic == HALF) {
        a[I][0] = weights_of<K>(x[0], x[1]), a[I][1] = weights_of<K>(x[4], x[5]);
        a[I][2] = weights_of<K>(x[2], x[3]), a[I][3] = weights_of<K>(x[6], x[7]);
    } else {
        u32(&first)[4] = a[2 * I], (&second)[4] = a[2 * I + 1];
        first[0] = x[0], first[1] = x[4], first[2] = x[1], first[3] = x[5];
        second[0] = x[2], second[1] = x[6], second[2] = x[3], second[3] = x[7];
    }
}
template <class K>
__device__ __forceinline__ void decode_step(Step<K>& a, u32 row, int lane) {
    u32 words[K::Window::words];
    load_words<K::half_bits>(words, SharedWords{row}, lane);
    decode_products<K, 0>(a, words);
    decode_products<K, 1>(a, words);
    decode_products<K, 2>(a, words);
    decode_products<K, 3>(a, words);
}

// All products of a step, on top of `start`.
template <class K, int P = 0>
__device__ __forceinline__ void multiply_step(KBlockSum<K> (&sums)[K::columns][4], const KBlockSum<K> (&start)[K::columns][4], const Step<K>& a,
                                              Operand<K>& operand) {
    multiply_product<K, P>(sums, start, a[P], operand);
    if constexpr (P + 1 < PRODUCTS<K>) multiply_step<K, P + 1>(sums, sums, a, operand);
}

// The same from a step's words, decoding for one product while another runs.
template <class K, int I = 0>
__device__ __forceinline__ void multiply_words(KBlockSum<K> (&sums)[K::columns][4], const KBlockSum<K> (&start)[K::columns][4],
                                               const u32 (&words)[K::Window::words], Operand<K>& operand) {
    constexpr int count = PRODUCTS<K> / 4;
    Step<K> a;
    decode_products<K, I>(a, words);
    multiply_product<K, count * I>(sums, start, a[count * I], operand);
    if constexpr (count == 2) multiply_product<K, count * I + 1>(sums, sums, a[count * I + 1], operand);
    if constexpr (I + 1 < 4) multiply_words<K, I + 1>(sums, sums, words, operand);
}

// Where a lane finds a step's words in a stage. Steps are in the order of halves of k, then tile columns.
template <class K, int J>
__device__ __forceinline__ u32 step_at(int step, int lane) {
    constexpr u32 tile_bytes = 4 * K::Window::tile_words, row_bytes = J * tile_bytes + ROW_PAD;
    return (lane & 3) * row_bytes + step / J * 4 * row_bytes + step % J * tile_bytes;
}

// Where a lane reads in a record.
template <class K>
struct LanePlaces {
    using R = Record<K::arithmetic, K::tile_rows>;
    static constexpr int tokens = K::arithmetic == INTEGER ? 1 : 2;  // a group
    u32 operand, token[tokens];

    LanePlaces(int lane, u32 rows) {
        const auto place = [&](u32 index) { return (K::columns == 1 ? min(index, rows - 1) : index) * R::token_bytes; };
        const u32 column = lane >> 2;
        operand = place(column / R::planes) + column % R::planes * 64 + (lane & 3) * 16;
#pragma unroll
        for (int i = 0; i < tokens; ++i) token[i] = place((lane & 3) * tokens + i);
    }
};

// A lane's operands of the tokens of a k block: INTEGER columns 2q, 2q+1 are the planes of token q (of 4 a group), else tokens
// 2q, 2q+1 (of 8 a group).
template <class K>
struct LaneTokens {
    static constexpr int count = K::arithmetic == INTEGER ? 1 : 2;  // a group
    float descale[K::columns][count];
    KBlockSum<K> start[K::columns][4];

    template <class Places>
    __device__ __forceinline__ void load(u32 record, const Places& places) {
        using R = typename Places::R;
#pragma unroll
        for (int group = 0; group < K::columns; ++group) {
#pragma unroll
            for (int i = 0; i < count; ++i) {
                const u32 token = record + places.token[i] + group * R::group * R::token_bytes;
                u32 words[4], factor[1];
                if constexpr (K::arithmetic == INTEGER) {
                    SharedWords{token + R::start_at}.run(words, 0);
#pragma unroll
                    for (int j = 0; j < 4; ++j) start[group][j] = static_cast<int>(words[j]);
                }
                SharedWords{token + R::descale_at}.run(factor, 0);
                descale[group][i] = __uint_as_float(factor[0]);
                if constexpr (K::arithmetic != INTEGER) {
                    u32 begin[1] = {0};
                    if constexpr (K::byte_sums || K::arithmetic == BYTE) SharedWords{token + R::start_at}.run(begin, 0);
                    if constexpr (K::arithmetic == BYTE) start[group][i] = start[group][i + 2] = static_cast<int>(begin[0]);
                    else start[group][i] = start[group][i + 2] = __uint_as_float(begin[0]);
                }
            }
        }
    }
    static __device__ __forceinline__ u32 token_of(int group, int i, int lane) {
        return (4 * group + (lane & 3)) * count + i;
    }
};

// fp32 sums over k blocks: [channel g or g + 8][token].
template <class K> using Totals = float[K::columns][2][LaneTokens<K>::count];

template <class K>
__device__ __forceinline__ void add_k_block(Totals<K>& totals, const KBlockSum<K> (&sums)[K::columns][4], const LaneTokens<K>& tokens) {
#pragma unroll
    for (int group = 0; group < K::columns; ++group) {
#pragma unroll
        for (int channel = 0; channel < 2; ++channel) {
            const KBlockSum<K>* sum = &sums[group][2 * channel];
            if constexpr (K::arithmetic == INTEGER) {
                const float exact = static_cast<float>(128 * sum[0] + sum[1]);
                totals[group][channel][0] = fmaf(exact, tokens.descale[group][0], totals[group][channel][0]);
            } else {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    totals[group][channel][i] = fmaf(static_cast<float>(sum[i]), tokens.descale[group][i], totals[group][channel][i]);
            }
        }
    }
}

// One item of one warp: decoded weights times the kept activations, into sums that begin where LaneTokens says.
#pragma once
#include "narrow_activations.cuh"

template <class K> using ItemSum = typename Sum<K::arithmetic>::type;

// The B operand of a unit of 64 k: lane (g, q) has token plane g of k-tile q. Kept in registers for all tiles, or, where two groups
// of columns leave none to spare, read again for every two products.
template <class K>
struct Operand {
    static constexpr bool kept = K::columns == 1;
    static constexpr int quads = kept ? K::matrices / 4 : 1;
    u32 from;  // the lane's first word
    u32 b[K::columns][4 * quads];

    explicit __device__ __forceinline__ Operand(u32 from) : from(from) {
        if constexpr (kept) load<0>();
    }
    // Makes sure of the words of product P.
    template <int P>
    __device__ __forceinline__ void need() {
        if constexpr (!kept && P % 2 == 0) load<P / 2>();
    }
    template <int P>
    __device__ __forceinline__ u32 word(int group, int i) const { return b[group][2 * (kept ? P : P % 2) + i]; }

private:
    template <int FIRST>
    __device__ __forceinline__ void load() {
        using R = Record<K::arithmetic, K::tile_rows>;
#pragma unroll
        for (int group = 0; group < K::columns; ++group) {
#pragma unroll
            for (int quad = 0; quad < quads; ++quad) {
                u32(&words)[4] = *reinterpret_cast<u32(*)[4]>(&b[group][4 * quad]);
                SharedWords{from + group * 512 + (FIRST + quad) * R::quad_bytes}.run(words, 0);
            }
        }
    }
};

template <class K, int I>
__device__ __forceinline__ void decode_products(u32 (&a)[4], const u32 (&words)[K::Window::words]) {
    using W = typename K::Window;
    if constexpr (K::byte_sums) {
        a[0] = decode_byte_sums(W::template get<8 * I>(words), W::template get<8 * I + 1>(words));
        a[1] = decode_byte_sums(W::template get<8 * I + 4>(words), W::template get<8 * I + 5>(words));
        a[2] = decode_byte_sums(W::template get<8 * I + 2>(words), W::template get<8 * I + 3>(words));
        a[3] = decode_byte_sums(W::template get<8 * I + 6>(words), W::template get<8 * I + 7>(words));
    } else {
        decode_step<K, I>(a, words);
    }
}

// Product P of a unit, on top of `start`.
template <class K, int P>
__device__ __forceinline__ void multiply_product(ItemSum<K> (&sums)[K::columns][4], const ItemSum<K> (&start)[K::columns][4],
                                                 const u32 (&words)[K::Window::words], Operand<K>& operand) {
    using W = typename K::Window;
    u32 a[4];
    operand.template need<P>();
    if constexpr (K::arithmetic == HALF) {
        decode_products<K, P>(a, words);
    } else {
        constexpr int i = P / 2, h = P % 2;
        a[0] = product_word<K::codebook>(W::template get<8 * i + 2 * h>(words));
        a[1] = product_word<K::codebook>(W::template get<8 * i + 4 + 2 * h>(words));
        a[2] = product_word<K::codebook>(W::template get<8 * i + 2 * h + 1>(words));
        a[3] = product_word<K::codebook>(W::template get<8 * i + 5 + 2 * h>(words));
    }
#pragma unroll
    for (int group = 0; group < K::columns; ++group) {
        const u32 first = operand.template word<P>(group, 0), second = operand.template word<P>(group, 1);
        if constexpr (K::arithmetic == INTEGER) mma_integer(sums[group], a, first, second, start[group]);
        else mma_half(sums[group], a, first, second, start[group]);
    }
}

// One tile column: 64 k × 16 output channels, on top of `start`.
template <class K>
__device__ __forceinline__ void multiply_unit(ItemSum<K> (&sums)[K::columns][4], const ItemSum<K> (&start)[K::columns][4],
                                              const u32 (&words)[K::Window::words], Operand<K>& operand) {
    multiply_product<K, 0>(sums, start, words, operand);
    multiply_product<K, 1>(sums, sums, words, operand);
    multiply_product<K, 2>(sums, sums, words, operand);
    multiply_product<K, 3>(sums, sums, words, operand);
    if constexpr (K::arithmetic != HALF) {
        multiply_product<K, 4>(sums, sums, words, operand);
        multiply_product<K, 5>(sums, sums, words, operand);
        multiply_product<K, 6>(sums, sums, words, operand);
        multiply_product<K, 7>(sums, sums, words, operand);
    }
}

// What a lane needs of the tokens of an item: INTEGER columns 2q, 2q+1 are the planes of token q (of 4 a group), else tokens
// 2q, 2q+1 (of 8 a group).
template <class K>
struct LaneTokens {
    static constexpr int count = K::arithmetic == INTEGER ? 1 : 2;  // a group
    float undo[K::columns][count];
    ItemSum<K> start[K::columns][4];

    // `starts` and `undoes` are the lane's.
    __device__ __forceinline__ void load(u32 starts, u32 undoes) {
#pragma unroll
        for (int group = 0; group < K::columns; ++group) {
            u32 words[4], factors[count];
            SharedWords{undoes + group * 16 * count}.run(factors, 0);
#pragma unroll
            for (int i = 0; i < count; ++i) undo[group][i] = __uint_as_float(factors[i]);
            if constexpr (K::arithmetic == INTEGER || K::byte_sums) SharedWords{starts + group * 64}.run(words, 0);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (K::arithmetic == INTEGER) start[group][i] = static_cast<int>(words[i]);
                else start[group][i] = K::byte_sums ? __uint_as_float(words[i]) : 0.0f;
            }
        }
    }
    static __device__ __forceinline__ u32 token_of(int group, int i, int lane) {
        return (4 * group + (lane & 3)) * count + i;
    }
};

// fp32 sums over items: [channel g or g + 8][token].
template <class K> using Totals = float[K::columns][2][LaneTokens<K>::count];

template <class K>
__device__ __forceinline__ void add_item(Totals<K>& totals, const ItemSum<K> (&sums)[K::columns][4], const LaneTokens<K>& tokens) {
#pragma unroll
    for (int group = 0; group < K::columns; ++group) {
#pragma unroll
        for (int channel = 0; channel < 2; ++channel) {
            const ItemSum<K>* sum = &sums[group][2 * channel];
            if constexpr (K::arithmetic == INTEGER) {
                const float exact = static_cast<float>(128 * sum[0] + sum[1]);
                totals[group][channel][0] = fmaf(exact, tokens.undo[group][0], totals[group][channel][0]);
            } else {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    totals[group][channel][i] = fmaf(sum[i], tokens.undo[group][i], totals[group][channel][i]);
            }
        }
    }
}

// Weights of a tile's tokens: each warp multiplies the keys of 16 tokens with all query rows of the block.
#pragma once
#include "kv/query.cuh"
#include "base/mma.cuh"

constexpr float KV_ROOM = 15.0f;   // weights are at most 2^15
constexpr float KV_FRESH = 10.0f;  // and at most 2^10 after a top was raised, so that it seldom is

// Where a thread is, and where shared memory begins. g, t: place in a product's operands.
struct KvPlace {
    u8* shared;
    u32 base;
    int warp, lane, g, t;

    __device__ __forceinline__ explicit KvPlace(u8* shared)
        : shared(shared), base(shared_address(shared)), warp(threadIdx.x / 32), lane(threadIdx.x & 31), g(lane >> 2), t(lane & 3) {}
};

template <class S>
struct KvScores : KvPlace {
    const KvDecodeArgs& args;
    const KvWork& work;
    KvRows<S::ROWS>& rows;
    float total[S::TILES][2], top[S::TILES][2];  // of rows 2t and 2t + 1: weights of this warp's tokens, and their reference
    u32 held[S::HELD ? S::WORDS : 1][S::HELD ? S::TILES : 1][4];

    __device__ __forceinline__ KvScores(const KvPlace& place, const KvDecodeArgs& args, const KvWork& work, KvRows<S::ROWS>& rows)
        : KvPlace(place), args(args), work(work), rows(rows) {
#pragma unroll
        for (int n = 0; n < S::TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) total[n][i] = 0.0f, top[n][i] = KV_LOWEST;
    }

    __device__ __forceinline__ void query_words(u32 (&words)[4], int word, int tile) const {
        load_words(words, base + S::QUERY_AT + (8 * tile + g) * S::QUERY_PITCH + (4 * word + t) * 16);
    }
    __device__ __forceinline__ void hold_queries() {
        if constexpr (S::HELD) {
#pragma unroll
            for (int word = 0; word < S::WORDS; ++word)
#pragma unroll
                for (int n = 0; n < S::TILES; ++n) query_words(held[word][n], word, n);
            __syncthreads();  // the last stage is free again
        }
    }

    // Products of this warp's 16 keys with every row: tokens g and g + 8 times rows 2t and 2t + 1.
    __device__ __forceinline__ void multiply_keys(float (&scores)[S::TILES][4], u32 slots) const {
#pragma unroll
        for (int n = 0; n < S::TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[n][i] = rows.raised[8 * n + 2 * t + i % 2];
#pragma unroll
        for (int pair = 0; pair < S::WORDS; pair += 2) {
            u32 first[2], second[2];
            load_words(first[0], first[1], slots + (t * S::WORDS + pair) * 4);
            load_words(second[0], second[1], slots + 8 * S::SLOT + (t * S::WORDS + pair) * 4);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 low[4] = {raised_nibbles<0>(first[i]), raised_nibbles<0>(second[i]), raised_nibbles<1>(first[i]), raised_nibbles<1>(second[i])};
                const u32 high[4] = {raised_nibbles<2>(first[i]), raised_nibbles<2>(second[i]), raised_nibbles<3>(first[i]), raised_nibbles<3>(second[i])};
#pragma unroll
                for (int n = 0; n < S::TILES; ++n) {
                    u32 query[4];
                    if constexpr (S::HELD) {
#pragma unroll
                        for (int k = 0; k < 4; ++k) query[k] = held[pair + i][n][k];
                    } else {
                        query_words(query, pair + i, n);
                    }
                    mma_half(scores[n], low, query[0], query[1]);
                    mma_half(scores[n], high, query[2], query[3]);
                }
            }
        }
    }

    // Weights of this warp's tokens of a tile, into shared memory; raises tops where weights would grow too large.
    __device__ __forceinline__ void weigh(int step, u32 stage) {
        const int tile = work.begin + step;
        const u32 slots = stage + (warp * KV_GROUP + g) * S::SLOT;
        float scores[S::TILES][4];
        multiply_keys(scores, slots);
        const int token = tile * KV_TILE + warp * KV_GROUP + g, first = work.context + work.block;
        // Uniform: does any row not see the whole tile?
        const bool masked = tile * KV_TILE + KV_TILE - 1 > first ||
            (args.window && tile * KV_TILE <= first + int(args.block_query) - 1 - int(args.window));
        const int window_end = args.window ? first - int(args.window) : -1;  // the last token before every row's window
        const u32 shifts = base + S::SHIFTS_AT + (step & 1) * 2 * S::SHIFT_BYTES + (warp * KV_GROUP + g) * 2;
        float log_scale[2], inverse[2], key_factor[2], key_zero[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 key = load_word(slots + 8 * i * S::SLOT + S::KEY_SCALE), value = load_word(slots + 8 * i * S::SLOT + S::VALUE_SCALE);
            key_zero[i] = float(key & 15), key_factor[i] = __uint_as_float(key & ~15u) * args.scale;
            if (t == 0) {
                store_half(shifts + 16 * i, zero_shift<0>(value & 15));
                store_half(shifts + 16 * i + S::SHIFT_BYTES, zero_shift<1>(value & 15));
            }
            // A slot past the end may hold any bits, and vLLM points pages before the window at one of zeros: such a scale
            // must not make 0·NaN or 0·∞ of its zero weight.
            const bool unseen = masked && (token + 8 * i >= work.length || token + 8 * i <= window_end);
            const float factor = unseen ? 1.0f : __uint_as_float(value & ~15u);
            log_scale[i] = binary_logarithm(factor), inverse[i] = reciprocal(factor);
        }
        const bool capped = args.soft_cap > 0.0f;
#pragma unroll
        for (int n = 0; n < S::TILES; ++n) {
            const float unit = rows.unit[n];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float product = fmaf(-key_zero[i / 2], rows.sum[8 * n + 2 * t + i % 2], scores[n][i]);
                scores[n][i] = fmaf(product, key_factor[i / 2] * unit, capped ? 0.0f : log_scale[i / 2]);
            }
        }
        if (capped) cap(scores, log_scale);
        if (masked) mask(scores, token);
        float powers[S::TILES][4];
        if (relate(powers, scores)) {
            raise_tops(scores, step);
            relate(powers, scores);
        }
        const u32 weights = base + S::WEIGHTS_AT + (step & 1) * S::ROWS * S::WEIGHT_PITCH + (warp * KV_GROUP + g) * 2;
#pragma unroll
        for (int n = 0; n < S::TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float p = power_of_two(powers[n][i]);
                total[n][i % 2] = fmaf(p, inverse[i / 2], total[n][i % 2]);
                store_half(weights + (8 * n + 2 * t + i % 2) * S::WEIGHT_PITCH + i / 2 * 16, float_to_half(p));
            }
    }

    // Scores relative to tops; true in every lane if one in the warp is too large.
    __device__ __forceinline__ bool relate(float (&powers)[S::TILES][4], const float (&scores)[S::TILES][4]) const {
        bool found = false;
#pragma unroll
        for (int n = 0; n < S::TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                powers[n][i] = scores[n][i] - top[n][i % 2];
                found |= powers[n][i] > KV_ROOM;
            }
        return __any_sync(0xffffffffu, found);
    }
    __device__ __forceinline__ void cap(float (&scores)[S::TILES][4], const float (&log_scale)[2]) const {
        constexpr float log2_e = 1.4426950408889634f;
#pragma unroll
        for (int n = 0; n < S::TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float grown = power_of_two(scores[n][i] * (2.0f * log2_e / args.soft_cap)) + 1.0f;
                scores[n][i] = fmaf(args.soft_cap * log2_e, 1.0f - 2.0f * reciprocal(grown), log_scale[i / 2]);
            }
    }
    // Takes out what a row does not see; `token` is the first of this thread's.
    __device__ __forceinline__ void mask(float (&scores)[S::TILES][4], int token) const {
#pragma unroll
        for (int n = 0; n < S::TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = token + i / 2 * 8, position = rows.position[8 * n + 2 * t + i % 2];
                if (key > position || (args.window && key <= position - int(args.window))) scores[n][i] = -__uint_as_float(0x7f800000u);
            }
    }

    __device__ __forceinline__ void raise_tops(const float (&scores)[S::TILES][4], int step) {
#pragma unroll
        for (int n = 0; n < S::TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float old = top[n][i];
                float most = fmaxf(scores[n][i], scores[n][i + 2]);
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, mask));
                if (most > old + KV_ROOM) move_top(n, i, ceilf(most) - KV_FRESH);
            }
        if (lane == 0) rows.changed[step & 1] = step + 1;
    }
    __device__ __forceinline__ void move_top(int n, int i, float to) {
        const float decay = power_of_two(top[n][i] - to);
        total[n][i] *= decay, top[n][i] = to;
        if (g == 0) rows.tops[8 * n + 2 * t + i][warp] = to;
    }
};

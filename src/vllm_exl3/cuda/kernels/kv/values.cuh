// Sums of values by the weights of all tokens: each warp has its share of the elements.
#pragma once
#include "kv/scores.cuh"

template <class S>
struct KvValues : KvPlace {
    KvRows<S::ROWS>& rows;
    float output[S::OWN][4][S::TILES][4];

    __device__ __forceinline__ KvValues(const KvPlace& place, KvRows<S::ROWS>& rows) : KvPlace(place), rows(rows) {
#pragma unroll
        for (int own = 0; own < S::OWN; ++own)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int n = 0; n < S::TILES; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) output[own][j][n][i] = 0.0f;
    }

    __device__ __forceinline__ float highest(int row) const {
        const float* tops = rows.tops[row];
        return fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    }
    // After a warp raised a top: what weights are multiplied by, and sums brought to the new tops.
    __device__ __forceinline__ void follow_tops(KvScores<S>& scores, u32 (&factors)[S::TILES][KV_WARPS]) {
        float now[S::TILES][2];
#pragma unroll
        for (int n = 0; n < S::TILES; ++n) {
            const float most = highest(8 * n + g);
#pragma unroll
            for (int other = 0; other < KV_WARPS; ++other) {
                const u32 half = float_to_half(power_of_two(rows.tops[8 * n + g][other] - most));
                factors[n][other] = half | half << 16;
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                now[n][i] = highest(8 * n + 2 * t + i);
                const float decay = power_of_two(rows.old_top[8 * n + 2 * t + i] - now[n][i]);
#pragma unroll
                for (int own = 0; own < S::OWN; ++own)
#pragma unroll
                    for (int j = 0; j < 4; ++j) output[own][j][n][i] *= decay, output[own][j][n][i + 2] *= decay;
            }
        }
        __syncthreads();  // all have read
#pragma unroll
        for (int n = 0; n < S::TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                scores.move_top(n, i, now[n][i]);
                if (warp == 0 && g == 0) rows.old_top[8 * n + 2 * t + i] = now[n][i];
            }
    }

    // Adds the tile's values, of this warp's elements, by the weights of all its tokens.
    __device__ __forceinline__ void add(KvScores<S>& scores, int step, u32 stage) {
        u32 factors[S::TILES][KV_WARPS];
        const bool changed = rows.changed[step & 1] == u32(step + 1);
        if (changed) follow_tops(scores, factors);
        const u32 weights = base + S::WEIGHTS_AT + (step & 1) * S::ROWS * S::WEIGHT_PITCH;
#pragma unroll
        for (int group = 0; group < KV_WARPS / S::SHARE; ++group) {
            const int k = S::SHARE == 1 ? group : group * S::SHARE + warp / S::SLICES;
            u32 p[S::TILES][2];
#pragma unroll
            for (int n = 0; n < S::TILES; ++n) {
                load_words(p[n][0], p[n][1], weights + (8 * n + g) * S::WEIGHT_PITCH + k * 2 * KV_GROUP + 8 * t);
                if (changed) {
                    u32 factor = factors[n][0];
#pragma unroll
                    for (int other = 1; other < KV_WARPS; ++other) factor = k == other ? factors[n][other] : factor;
                    p[n][0] = multiply_halves(p[n][0], factor), p[n][1] = multiply_halves(p[n][1], factor);
                }
            }
            const u32 shifts = base + S::SHIFTS_AT + (step & 1) * 2 * S::SHIFT_BYTES + k * 2 * KV_GROUP + 8 * t;
            u32 even[2], odd[2];
            load_words(even[0], even[1], shifts), load_words(odd[0], odd[1], shifts + S::SHIFT_BYTES);
            const u32 slots = stage + (k * KV_GROUP + 4 * t) * S::SLOT + S::VALUES + 4 * g;
#pragma unroll
            for (int own = 0; own < S::OWN; ++own) {
                u32 words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) words[i] = load_word(slots + i * S::SLOT + 32 * slice(own));
                // Pairs of tokens, of the elements 8g..8g+3 and 8g+4..8g+7.
                const u32 pairs[4] = {__byte_perm(words[0], words[1], 0x5410), __byte_perm(words[0], words[1], 0x7632),
                                      __byte_perm(words[2], words[3], 0x5410), __byte_perm(words[2], words[3], 0x7632)};
                add_stream<0>(own, pairs, even, p), add_stream<1>(own, pairs, odd, p);
                add_stream<2>(own, pairs, even, p), add_stream<3>(own, pairs, odd, p);
            }
        }
    }
    template <int J>
    __device__ __forceinline__ void add_stream(int own, const u32 (&pairs)[4], const u32 (&shifts)[2], const u32 (&p)[S::TILES][2]) {
        const u32 a[4] = {centred_nibbles<J>(pairs[0], shifts[0]), centred_nibbles<J>(pairs[1], shifts[0]),
                          centred_nibbles<J>(pairs[2], shifts[1]), centred_nibbles<J>(pairs[3], shifts[1])};
#pragma unroll
        for (int n = 0; n < S::TILES; ++n) mma_half(output[own][J][n], a, p[n][0], p[n][1]);
    }
    __device__ __forceinline__ int slice(int own) const { return S::SHARE == 1 ? warp + own * KV_WARPS : warp % S::SLICES; }

    // Sums of all tokens of the segment, to where merge_kernel looks for them. The ring is free.
    __device__ __forceinline__ void finish(const KvScores<S>& scores) {
        float* sums = reinterpret_cast<float*>(shared);  // [KV_WARPS][ROWS], then what warps that share a slice hold
        float* shares = sums + KV_WARPS * S::ROWS;
        __syncthreads();
#pragma unroll
        for (int n = 0; n < S::TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float sum = scores.total[n][i];
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
                if (g == 0) sums[warp * S::ROWS + 8 * n + 2 * t + i] = sum;
            }
        constexpr int held_here = S::TILES * 16;
        static_assert(4 * (KV_WARPS * S::ROWS + (S::SHARE > 1 ? KV_WARPS - S::SLICES : 0) * held_here * 32) <= S::ROWS_AT);
        if constexpr (S::SHARE > 1) {
            if (warp >= S::SLICES)
#pragma unroll
                for (int i = 0; i < held_here; ++i) shares[((warp - S::SLICES) * held_here + i) * 32 + lane] = output[0][i / 4 % 4][i / 16][i % 4];
        }
        __syncthreads();
        if (S::SHARE > 1 && warp >= S::SLICES) return;
        if constexpr (S::SHARE > 1)
            for (int other = warp; other < KV_WARPS - S::SLICES; other += S::SLICES)
#pragma unroll
                for (int i = 0; i < held_here; ++i) output[0][i / 4 % 4][i / 16][i % 4] += shares[(other * held_here + i) * 32 + lane];
#pragma unroll
        for (int n = 0; n < S::TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) store_row(scores, 8 * n + 2 * t + i, n, i, sums);
    }
    __device__ __forceinline__ void store_row(const KvScores<S>& scores, int row, int n, int i, const float* sums) const {
        int token, query_head;
        if (!scores.work.row(scores.args, row, S::ROWS, token, query_head)) return;
        float sum = 0.0f;
        for (int other = 0; other < KV_WARPS; ++other) sum += sums[other * S::ROWS + row];
        const i64 at = (i64(scores.work.program) * scores.args.segments + scores.work.segment) * S::ROWS + row;
#pragma unroll
        for (int own = 0; own < S::OWN; ++own)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float* to = scores.args.partial + at * S::SIZE + j * (S::SIZE / 4) + 16 * slice(own) + 2 * g;
                to[0] = output[own][j][n][i], to[1] = output[own][j][n][i + 2];
            }
        if (warp == 0 && g == 0) scores.args.stats[2 * at] = scores.top[n][i], scores.args.stats[2 * at + 1] = sum;
    }
};

// Decoding over the int4 KV cache: a block attends the query rows of one KV head to one segment of the context.
//
// Products are transposed: nibbles are the left operand, in registers, so that one unpacking serves all rows. Of a tile of 64
// tokens each warp multiplies the keys of 16 with the queries, and leaves weights in shared memory; after a barrier, the
// step's only one, each multiplies its share of the values' elements with all 64 weights. Copies run two tiles ahead.
//
// Exactness is that of attention/attend.py: nibbles are exact in float16, queries come to its range by a power of two, a
// value's scale goes into the exponent of its weight. Zero-points of keys are applied in float32 to the rounded queries, those
// of values to the nibbles, exactly.
#pragma once
#include "kv_decode_query.cuh"
#include "launch.cuh"
#include "mma.cuh"

constexpr float KV_ROOM = 15.0f;  // weights are at most 2^15
constexpr float KV_FRESH = 10.0f;  // and at most 2^10 after a top was raised, so that it seldom is

template <class S>
struct KvDecode {
    const KvDecodeArgs& args;
    const KvWork& work;
    KvRows<S::ROWS>& rows;
    u8* shared;
    u32 base;                     // shared address of `shared`
    int warp, lane, g, t;         // g, t: place in a product's operands
    const u8* cache;              // of this KV head
    int page_number;              // of the tile that is copied next

    float output[S::OWN][4][S::TILES][4];
    float total[S::TILES][2], top[S::TILES][2];  // of rows 2t and 2t + 1
    u32 held[S::HELD ? S::WORDS : 1][S::HELD ? S::TILES : 1][4];

    __device__ __forceinline__ KvDecode(const KvDecodeArgs& args, const KvWork& work, KvRows<S::ROWS>& rows, u8* shared)
        : args(args), work(work), rows(rows), shared(shared), base(shared_address(shared)), warp(threadIdx.x / 32),
          lane(threadIdx.x & 31), g(lane >> 2), t(lane & 3), cache(args.cache + i64(work.head) * args.head_stride) {}

    __device__ __forceinline__ u32 page_index(u32 token) const {
        return args.page_shift < 32 ? token >> args.page_shift : token / args.page;
    }
    // The page of this warp's tokens of a tile; 0 past the end, where nothing is copied.
    __device__ __forceinline__ int page_of(int tile) const {
        const int token = tile * KV_TILE + warp * KV_GROUP;
        return tile < work.end && token < work.length ? args.table[i64(work.request) * args.table_stride + page_index(token)] : 0;
    }

    // Starts copying this warp's tokens of a tile.
    __device__ __forceinline__ void fetch(int tile, int stage, int page) {
        const int token = tile * KV_TILE + warp * KV_GROUP;
        if (tile < work.end && token < work.length) {
            const u32 inside = u32(token) - page_index(token) * args.page;
            const u8* source = cache + i64(page) * args.page_stride + u64(inside) * args.slot_stride;
            const u32 target = base + stage * S::STAGE_BYTES + warp * KV_GROUP * S::SLOT;
            constexpr int chunks = KV_GROUP * S::SLOT / S::CHUNK, a_slot = S::SLOT / 8;
#pragma unroll
            for (int first = 0; first < chunks; first += 32) {
                const int chunk = first + lane;
                if (first + 32 > chunks && chunk >= chunks) break;
                // Chunks of 16 bytes are for slots that follow each other.
                const u8* from = S::CHUNK == 16 ? source + 16 * chunk : source + u64(chunk / a_slot) * args.slot_stride + chunk % a_slot * 8;
                start_copy<S::CHUNK>(target + S::CHUNK * chunk, from);
            }
        }
        close_copies();
    }
    __device__ __forceinline__ void fetch_next(int tile, int stage) {
        fetch(tile, stage, page_number);
        page_number = page_of(tile + 1);
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

    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int n = 0; n < S::TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) total[n][i] = 0.0f, top[n][i] = KV_LOWEST;
#pragma unroll
            for (int own = 0; own < S::OWN; ++own)
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i) output[own][j][n][i] = 0.0f;
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
            // A slot past the end may hold any bits: its scale must not make 0·NaN of its zero weight.
            const float factor = masked && token + 8 * i >= work.length ? 1.0f : __uint_as_float(value & ~15u);
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

    __device__ __forceinline__ float highest(int row) const {
        const float* tops = rows.tops[row];
        return fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    }
    // After a warp raised a top: what weights are multiplied by, and sums brought to the new tops.
    __device__ __forceinline__ void follow_tops(u32 (&factors)[S::TILES][KV_WARPS]) {
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
                move_top(n, i, now[n][i]);
                if (warp == 0 && g == 0) rows.old_top[8 * n + 2 * t + i] = now[n][i];
            }
    }

    // Adds the tile's values, of this warp's elements, by the weights of all its tokens.
    __device__ __forceinline__ void add_values(int step, u32 stage) {
        u32 factors[S::TILES][KV_WARPS];
        const bool changed = rows.changed[step & 1] == u32(step + 1);
        if (changed) follow_tops(factors);
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
    __device__ __forceinline__ void finish() {
        float* sums = reinterpret_cast<float*>(shared);  // [KV_WARPS][ROWS], then what warps that share a slice hold
        float* shares = sums + KV_WARPS * S::ROWS;
        __syncthreads();
#pragma unroll
        for (int n = 0; n < S::TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float sum = total[n][i];
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
            for (int i = 0; i < 2; ++i) store_row(8 * n + 2 * t + i, n, i, sums);
    }
    __device__ __forceinline__ void store_row(int row, int n, int i, const float* sums) const {
        int token, query_head;
        if (!work.row(args, row, S::ROWS, token, query_head)) return;
        float sum = 0.0f;
        for (int other = 0; other < KV_WARPS; ++other) sum += sums[other * S::ROWS + row];
        const i64 at = (i64(work.program) * args.segments + work.segment) * S::ROWS + row;
#pragma unroll
        for (int own = 0; own < S::OWN; ++own)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float* to = args.partial + at * S::SIZE + j * (S::SIZE / 4) + 16 * slice(own) + 2 * g;
                to[0] = output[own][j][n][i], to[1] = output[own][j][n][i + 2];
            }
        if (warp == 0 && g == 0) args.stats[2 * at] = top[n][i], args.stats[2 * at + 1] = sum;
    }
};

template <class S>
__device__ __forceinline__ void kv_decode(const KvDecodeArgs& args) {
    extern __shared__ __align__(128) u8 shared[];
    auto& rows = *reinterpret_cast<KvRows<S::ROWS>*>(shared + S::ROWS_AT);
    KvWork work;
    if (!work.find(args)) return;
    KvDecode<S> block(args, work, rows, shared);
    {
        int pages[S::STAGES];  // all loads at once: pages, queries, keys and values
        KvQuery<S> query;
#pragma unroll
        for (int stage = 0; stage < S::STAGES; ++stage) pages[stage] = block.page_of(work.begin + stage);
        query.load(args, work);
#pragma unroll
        for (int stage = 0; stage < S::STAGES - 1; ++stage) block.fetch(work.begin + stage, stage, pages[stage]);
        block.page_number = pages[S::STAGES - 1];
        rotate_queries<S>(query, args, rows, shared);
    }
    block.hold_queries();
    block.reset();
    const int steps = work.end - work.begin;
    int stage = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const u32 slots = block.base + stage * S::STAGE_BYTES;
        wait_for_copies<S::STAGES - 2>();
        __syncwarp();
        block.weigh(step, slots);
        __syncthreads();
        // Into the stage of the step before, which all have left.
        block.fetch_next(work.begin + step + S::STAGES - 1, stage ? stage - 1 : S::STAGES - 1);
        block.add_values(step, slots);
        stage = stage + 1 < S::STAGES ? stage + 1 : 0;
    }
    let_next_start();
    block.finish();
}

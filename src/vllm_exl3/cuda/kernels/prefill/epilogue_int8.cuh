// The end of a tile of the fast mode, beside the products of the next one: the warps that multiplied leave their sums in shared
// memory, others rotate, scale and store them.
//
// Sums are left in fp16, a 4096th of them: they are integers, whose error of 3e-4 is nothing beside the rounding of weights and
// activations, and their size is bounded by what their columns of weights and rows of activations have in length. All that
// follows is done in the order in which prefill/reduce.cu does it, so that a tile has the same bits where it was split.
#pragma once
#include "prefill/epilogue.cuh"

// Tokens of a tile; blocks of a cluster, which share the activations. One Hadamard block a thread block.
template <int TOKENS_, int CLUSTER_>
struct ByteShape {
    static constexpr int TOKENS = TOKENS_, PAIRS = 1, CLUSTER = CLUSTER_, N_BLOCKS = CLUSTER;
    static constexpr u32 activation_bytes = TOKENS * BLOCK_K;
};

struct StagedEpilogue {
    static constexpr u32 PITCH = HADAMARD_SIZE * 2 + 16;            // bytes of a token: free of bank conflicts on both sides
    static constexpr int WRITERS = 3, CHANNELS = HADAMARD_SIZE / 4;    // warps; channels of a lane, four of which have a row
    static constexpr int FREE = 2, FILLED = 3;              // named barriers
    static constexpr int THREADS = PAIR_THREADS + 32 * WRITERS;
    static constexpr float STORED_SCALE = IntPartials::STORED_SCALE;

    u32 staged;  // shared: [token][tile column][8]: channels 16·column + i and 16·column + 8 + i

    static __device__ __forceinline__ constexpr u32 bytes(u32 tokens) { return tokens * PITCH; }

    // By the threads that have the sums, in the layout of wgmma's accumulators.
    template <int TOKENS>
    __device__ __forceinline__ void hand_over(const float (&sums)[TOKENS / 2], int warp, int lane) const {
        named_barrier_sync(FREE, THREADS);
        store_staged<TOKENS, 0>(sums, staged + 2 * (lane & 3) * PITCH + 32 * warp + 4 * (lane >> 2));
        arrive(FILLED);
    }

    // By the other warps, for the same work tiles.
    template <class S>
    __device__ __forceinline__ void finish(const PrefillArgs& args, const PrefillWorkTile& work, u32 place, int writer, int lane) const {
        const PrefillShard& shard = args.shards[work.shard];
        const u32 n_block = S::N_BLOCKS * work.n_tile + place, first_row = work.row_tile * S::TOKENS;
        const u32 rows = min(u32(S::TOKENS), args.rows - first_row), channel = CHANNELS * (lane >> 3);
        const Crop crop(args, shard, n_block);
        const float* descale = args.scales + work.shard * args.rows + first_row;
        u32 token = 8 * writer + (lane & 7);
        float next = token < rows ? __ldcg(descale + token) : 0.0f;
        arrive(FREE);
        named_barrier_sync(FILLED, THREADS);
#pragma unroll 1
        for (; token - (lane & 7) < rows; token += 8 * WRITERS) {
            const float scale = next * (HADAMARD_SCALE / STORED_SCALE);
            next = token + 8 * WRITERS < rows ? __ldcg(descale + token + 8 * WRITERS) : 0.0f;
            float v[CHANNELS];
            load(v, staged + token * PITCH + 2 * channel);
            butterfly<8>(v);  // first, as stage_tokens does it
            butterfly<1>(v), butterfly<2>(v), butterfly<4>(v), butterfly<16>(v);
#pragma unroll
            for (int step = 8; step <= 16; step *= 2) {  // channel bits 5 and 6
                const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
                for (int i = 0; i < CHANNELS; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xffffffffu, v[i], step));
            }
            apply(v, scale, shard.svh + n_block * HADAMARD_SIZE + channel);
            if (token < rows) store(v, args, crop, channel, first_row + token);
        }
    }

private:
    static __device__ __forceinline__ void arrive(u32 barrier) {
        asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
    }
    static __device__ __forceinline__ u32 pair(float low, float high) {
        return packed_halves(low * STORED_SCALE, high * STORED_SCALE);
    }
    template <int OFFSET>
    static __device__ __forceinline__ void store_word(u32 address, u32 word) {
        asm volatile("st.shared.u32 [%0 + %1], %2;" ::"r"(address), "n"(OFFSET), "r"(word) : "memory");
    }
    template <int TOKENS, int J>
    static __device__ __forceinline__ void store_staged(const float* sums, u32 address) {
        if constexpr (J < TOKENS / 8) {
            const float* d = sums + 4 * J;
            store_word<8 * J * PITCH>(address, pair(d[0], d[2]));
            store_word<(8 * J + 1) * PITCH>(address, pair(d[1], d[3]));
            store_staged<TOKENS, J + 1>(sums, address);
        }
    }
    static __device__ __forceinline__ void load(float (&v)[CHANNELS], u32 address) {
#pragma unroll
        for (int word = 0; word < CHANNELS / 2; word += 4) {
            u32 pairs[4];
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                         : "r"(address + 4 * word) : "memory");
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = 16 * (word / 8) + word % 8 + j;
                v[at] = half_to_float(u16(pairs[j])), v[at + 8] = half_to_float(u16(pairs[j] >> 16));
            }
        }
    }
    static __device__ __forceinline__ void apply(float (&v)[CHANNELS], float scale, const u16* svh) {
#pragma unroll
        for (int i = 0; i < CHANNELS; i += 8) {
            const uint4 raw = *reinterpret_cast<const uint4*>(svh + i);
            const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i + j] = v[i + j] * scale * half_to_float(u16(words[j / 2] >> 16 * (j & 1)));
        }
    }
    // The lane's channels of a row, `channel` and following of the Hadamard block.
    static __device__ __forceinline__ void store(float (&v)[CHANNELS], const PrefillArgs& args, const Crop& crop, u32 channel, u32 row) {
        const u32 kept = crop.first + channel - crop.shard.crop_start;  // wraps below the crop
        if (args.bias != nullptr) {
#pragma unroll
            for (int i = 0; i < CHANNELS; ++i) {
                const u32 column = kept + i;
                if (column < crop.shard.crop_size) v[i] += load_element(args.bias, crop.shard.out_column + column, args.bias_type);
            }
        }
        if (!crop.whole) {
#pragma unroll
            for (int i = 0; i < CHANNELS; ++i) {
                const u32 column = kept + i;
                if (column < crop.shard.crop_size)
                    store_element(args.out, row * args.out_stride + crop.shard.out_column + column, args.out_type, v[i]);
            }
            return;
        }
        const i64 first = crop.place(args, row) + channel;
        if (args.out_type == F32) {
            float* to = static_cast<float*>(args.out) + first;
#pragma unroll
            for (int i = 0; i < CHANNELS; i += 4) __stcs(reinterpret_cast<float4*>(to + i), make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]));
            return;
        }
        u16* to = static_cast<u16*>(args.out) + first;
#pragma unroll
        for (int i = 0; i < CHANNELS; i += 8) {
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (args.out_type == F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[j]) : "f"(v[i + 2 * j + 1]), "f"(v[i + 2 * j]));
                else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[j]) : "f"(v[i + 2 * j + 1]), "f"(v[i + 2 * j]));
            }
            // Streaming, not to displace activations in the L2.
            __stcs(reinterpret_cast<uint4*>(to + i), make_uint4(words[0], words[1], words[2], words[3]));
        }
    }
};

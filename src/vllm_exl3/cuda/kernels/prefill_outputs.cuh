// Ends tiles in warps of their own, while those that multiply go on to the next tile.
//
// With all of a tile's registers in use there is no room for a second tile's sums. They are left in shared memory in fp16, a
// 4096th of them: all of a tile at once, so that the warps that multiply do not wait for the slower ones that end it. That is one
// rounding more, as large as the rounding of activations; sums are bounded by the length of their columns of weights and rows of
// activations, 2^24 at most. The last tile of a block is ended by all of its warps.
#pragma once
#include "barrier.cuh"
#include "prefill_epilogue.cuh"

struct Outputs {
    static constexpr u32 PITCH = 2 * STRIP + 16;  // bytes of a token: free of bank conflicts on both sides
    static constexpr u32 SHARE = 32, ROWS = 8;    // channels of a lane; rows of a warp at once
    static constexpr u32 ENDING = 3;              // warps that do nothing else
    static constexpr u32 FREE = 2, FILLED = 3, ENDED = 4, THREADS = PAIR_THREADS + 32 * ENDING;  // barriers
    static constexpr float LEFT = 1.0f / 4096;

    template <class S> static constexpr u32 bytes = sizeof(Staging) + S::TOKENS * PITCH;

    Staging& staging;  // of scales only
    u32 halves;        // shared address: [token][tile column][8] pairs of channels i and i + 8 of the column

    __device__ __forceinline__ explicit Outputs(u8* memory)
        : staging(*reinterpret_cast<Staging*>(memory)), halves(shared_address(memory) + sizeof(Staging)) {}

    static __device__ __forceinline__ void arrive(u32 barrier) {
        asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
    }
    template <int OFFSET>
    static __device__ __forceinline__ void store_pair(u32 address, float low, float high) {
        u32 word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high * LEFT), "f"(low * LEFT));
        asm volatile("st.shared.u32 [%0 + %1], %2;" ::"r"(address), "n"(OFFSET), "r"(word) : "memory");
    }
    template <int TOKENS, int J>
    static __device__ __forceinline__ void leave(const float* sums, u32 address) {
        if constexpr (J < TOKENS / 8) {
            const float* d = sums + 4 * J;
            store_pair<8 * J * PITCH>(address, d[0], d[2]);
            store_pair<(8 * J + 1) * PITCH>(address, d[1], d[3]);
            leave<TOKENS, J + 1>(sums, address);
        }
    }
    // The multiplying warps' side.
    template <int TOKENS>
    __device__ __forceinline__ void hand_over(const float (&sums)[TOKENS / 2], int warp, int lane) const {
        sync_threads(FREE, THREADS);
        leave<TOKENS, 0>(sums, halves + 2 * (lane & 3) * PITCH + 32 * warp + 4 * (lane >> 2));
    }

    // Ends the tile's rows 8·first and following, every 8·`step`, in one warp.
    template <class S>
    __device__ __forceinline__ void end_rows(const PrefillArgs& args, const PrefillSegment& segment, u32 place, u32 first, u32 step, int lane) const {
        const PrefillShard& shard = args.shards[segment.shard];
        const u32 strip = S::STRIPS * segment.strip + place, first_row = segment.row_tile * S::TOKENS;
        const u32 rows = min(u32(S::TOKENS), args.rows - first_row), channel = SHARE * (lane / ROWS);
        const Crop crop(args, shard, strip);
#pragma unroll 1
        for (u32 row = ROWS * first; row < rows; row += ROWS * step) {
            const u32 token = row + lane % ROWS;
            float v[SHARE];
            load(v, halves + token * PITCH + 2 * channel);
            butterflies<1>(v);
#pragma unroll
            for (int lanes = ROWS; lanes < 32; lanes *= 2) {  // channel bits 5 and 6
                const float sign = lane & lanes ? -1.0f : 1.0f;
#pragma unroll
                for (int i = 0; i < int(SHARE); ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xffffffffu, v[i], lanes));
            }
            const float undo = staging.undo[token] * (HADAMARD_SCALE / LEFT);
#pragma unroll
            for (int i = 0; i < int(SHARE); i += 8) {
                const uint4 raw = *reinterpret_cast<const uint4*>(&staging.svh[channel + i]);
                const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
                for (int j = 0; j < 8; ++j) v[i + j] = v[i + j] * undo * half_to_float(u16(words[j / 2] >> 16 * (j & 1)));
            }
            if (args.bias != nullptr) {
#pragma unroll
                for (int i = 0; i < int(SHARE); i += 4) {
                    const float4 values = *reinterpret_cast<const float4*>(&staging.bias[channel + i]);
                    v[i] += values.x, v[i + 1] += values.y, v[i + 2] += values.z, v[i + 3] += values.w;
                }
            }
            if (token < rows) store(v, args, crop, channel, first_row + token);
        }
    }
    // The ending warps' side, for all tiles of the block.
    template <class S>
    __device__ __forceinline__ void end_tiles(const PrefillArgs& args, u32 place, u32 mine, int lane) const {
        PrefillWalk walk(args, blockIdx.x / S::CLUSTER, gridDim.x / S::CLUSTER);
        PrefillSegment segment;
        wait_for_previous();
        while (walk.next(args, segment)) {
            if (!segment.complete || !has_block<S>(args, segment, place)) continue;
            sync_threads(ENDED, 32 * ENDING);
            arrive(FREE);
            fetch_scales(args, staging, segment.shard, S::STRIPS * segment.strip + place, segment.row_tile * S::TOKENS, S::TOKENS,
                         32 * mine + lane, 32 * ENDING);
            asm volatile("cp.async.wait_all;" ::: "memory");
            sync_threads(FILLED, THREADS);
            end_rows<S>(args, segment, place, mine, segment.last ? ENDING + PAIR_WARPS : ENDING, lane);
        }
    }

private:
    static __device__ __forceinline__ void load(float (&v)[SHARE], u32 address) {
#pragma unroll
        for (u32 word = 0; word < SHARE / 2; word += 4) {
            u32 pairs[4];
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                         : "r"(address + 4 * word) : "memory");
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 at = 16 * (word / 8) + word % 8 + j;
                v[at] = half_to_float(u16(pairs[j])), v[at + 8] = half_to_float(u16(pairs[j] >> 16));
            }
        }
    }
    static __device__ __forceinline__ void store(const float (&v)[SHARE], const PrefillArgs& args, const Crop& crop, u32 channel, u32 row) {
        if (!crop.whole) {
#pragma unroll
            for (u32 i = 0; i < SHARE; ++i) {
                const u32 kept = crop.first + channel + i - crop.shard.crop_start;  // wraps below the crop
                if (kept < crop.shard.crop_size) store_element(args.out, row * args.out_stride + crop.shard.out_column + kept, args.out_type, v[i]);
            }
            return;
        }
        store_vectors<8>(v, args, crop.place(args, row) + channel);
    }
};

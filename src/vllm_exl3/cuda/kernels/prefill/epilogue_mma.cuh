// The epilogue of a tile on the tensor cores: the output Hadamard as a product of its sums in fp16 with a matrix of ones and minus ones.
//
// Butterflies in registers take more instructions than there are cycles to hide them: those that run beside wgmma slow it down,
// wherever they are. As a product the transform takes 1024 cycles a tile, and its result lies so that threads store 16 bytes.
// Rounding sums to fp16, a 4096th of them, is one rounding more, as large as the rounding of activations; sums are bounded by the
// length of their columns of weights and rows of activations, 2^24 at most.
#pragma once
#include "base/cp_async.cuh"
#include "prefill/epilogue.cuh"
#include "base/wgmma_shared.cuh"

template <int TOKENS>
struct HadamardEpilogue {
    static constexpr u32 HALF = 64;                      // channels that a warpgroup multiplied; the rest is one addition
    static constexpr u32 MATRIX_BYTES = HALF * HALF * 2;
    static constexpr u32 PITCH = TOKENS * 16 + 16;       // of eight channels of all tokens, and a pad against bank conflicts
    static constexpr u32 bytes = sizeof(Staging) + MATRIX_BYTES + HADAMARD_SIZE / 8 * PITCH;
    static constexpr float STORED_SCALE = 1.0f / 4096;

    Staging& staging;    // of scales only
    u32 matrix, halves;  // shared addresses, both in the layout of wgmma

    __device__ __forceinline__ explicit HadamardEpilogue(u8* memory)
        : staging(*reinterpret_cast<Staging*>(memory)), matrix(shared_address(memory) + sizeof(Staging)), halves(matrix + MATRIX_BYTES) {}

    // Channel of place k of a half: a thread's two channels of a tile column lie side by side.
    static __device__ __forceinline__ u32 channel_in(u32 k) { return k / 16 * 16 + k % 16 / 2 + k % 2 * 8; }
    // Channel of column n of a half's result: a lane has eight and eight consecutive ones.
    static __device__ __forceinline__ u32 channel_out(u32 n) { return n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2; }

    // H of 64 channels, by 256 threads.
    __device__ __forceinline__ void write_matrix(u32 thread) const {
        for (u32 piece = thread; piece < MATRIX_BYTES / 16; piece += PAIR_THREADS) {
            const u32 n = piece % HALF, first = piece / HALF * 8;
            u32 words[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const u32 low = parity(channel_out(n) & channel_in(first + 2 * i)), high = parity(channel_out(n) & channel_in(first + 2 * i + 1));
                words[i] = 0x3c003c00u | low << 15 | high << 31;
            }
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(matrix + 16 * piece), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                         "r"(words[3]) : "memory");
        }
    }
    template <int OFFSET>
    static __device__ __forceinline__ void store_pair(u32 address, float low, float high) {
        u32 word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high * STORED_SCALE), "f"(low * STORED_SCALE));
        asm volatile("st.shared.u32 [%0 + %1], %2;" ::"r"(address), "n"(OFFSET), "r"(word) : "memory");
    }
    template <int J>
    static __device__ __forceinline__ void store_staged(const float* sums, u32 address) {
        if constexpr (J < TOKENS / 8) {
            const float* d = sums + 4 * J;
            store_pair<128 * J>(address, d[0], d[2]);
            store_pair<128 * J + 16>(address, d[1], d[3]);
            store_staged<J + 1>(sums, address);
        }
    }
    // All of a tile, by the 256 threads that multiplied it.
    template <class Block>
    __device__ __forceinline__ void run(const float (&sums)[TOKENS / 2], const Block& block, const PrefillShard& shard, u32 n_block, u32 first_row,
                                        u32 rows) const {
        const int lane = block.lane, g = lane >> 2, q = lane & 3;
        cp_async_wait_all();  // what fetch_scales started; others' is there after the next barrier
        store_staged<0>(sums, halves + (2 * block.warp + (g >> 2)) * PITCH + 32 * q + 4 * (g & 3));
        fence_proxy_async();
        block.sync();
        const Crop crop(block.args, shard, n_block);
#pragma unroll 1
        for (u32 first = 64 * (block.warp / 4); first < rows; first += 128) {  // every other 64 tokens a warpgroup
            float v[2][32] = {};
#pragma unroll
            for (u32 i = 0; i < 32; ++i) asm volatile("" : "+f"(v[0][i]), "+f"(v[1][i])::"memory");  // zero ahead of the fence
            warpgroup_fence();
#pragma unroll
            for (u32 half = 0; half < 2; ++half)
#pragma unroll
                for (u32 step = 0; step < 4; ++step)
                    multiply_shared(v[half], matrix_descriptor<PITCH>((halves + (8 * half + 2 * step) * PITCH + 16 * first) & 0x3ffff),
                                    matrix_descriptor<16 * HALF>((matrix + 2 * step * 16 * HALF) & 0x3ffff));
            warpgroup_commit();
            warpgroup_wait();
#pragma unroll
            for (u32 i = 0; i < 32; ++i) {
                asm volatile("" : "+f"(v[0][i]), "+f"(v[1][i])::"memory");
                const float a = v[0][i], b = v[1][i];
                v[0][i] = a + b, v[1][i] = a - b;
            }
            const bool lines = crop.whole && block.args.out_type != F32;
#pragma unroll
            for (u32 row = 0; row < 2; ++row) {
                const u32 token = first + 16 * (block.warp % 4) + 8 * row + g;
                const float descale = staging.descale[token] * (HADAMARD_SCALE / STORED_SCALE);
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    float eight[2][8];  // of 32 channels each
#pragma unroll
                    for (u32 split = 0; split < 2; ++split) {
#pragma unroll
                        for (u32 i = 0; i < 8; ++i) eight[split][i] = v[half][16 * split + i / 2 * 4 + 2 * row + i % 2];
                        scale_eight(eight[split], block.args, HALF * half + 32 * split + 8 * q, descale);
                    }
                    if (lines) {
                        store_lines(eight, block.args, crop.place(block.args, first_row + token) + HALF * half + 8 * q, token, rows, g & 1);
                    } else if (token < rows) {
#pragma unroll
                        for (u32 split = 0; split < 2; ++split) store_eight(eight[split], block.args, crop, HALF * half + 32 * split + 8 * q, first_row + token);
                    }
                }
            }
        }
        block.sync();  // the next tile's sums and scales go where this one's are
    }

private:
    static __device__ __forceinline__ u32 parity(u32 v) {
        v ^= v >> 4, v ^= v >> 2;
        return (v ^ v >> 1) & 1;
    }
    __device__ __forceinline__ void scale_eight(float (&v)[8], const PrefillArgs& args, u32 channel, float descale) const {
        const uint4 raw = *reinterpret_cast<const uint4*>(&staging.svh[channel]);
        const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = v[i] * descale * half_to_float(u16(words[i / 2] >> 16 * (i & 1)));
        if (args.bias != nullptr) {
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] += staging.bias[channel + i];
        }
    }
    static __device__ __forceinline__ void store_eight(float (&v)[8], const PrefillArgs& args, const Crop& crop, u32 channel, u32 row) {
        if (crop.whole) return store_vectors<8>(v, args, crop.place(args, row) + channel);
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            const u32 kept = crop.first + channel + i - crop.shard.crop_start;  // wraps below the crop
            if (kept < crop.shard.crop_size) store_element(args.out, row * args.out_stride + crop.shard.out_column + kept, args.out_type, v[i]);
        }
    }
    // 64 channels of two neighbouring tokens, of which the four lanes of each have eight and eight (32 apart): all eight lanes store
    // one token after the other, whole lines of 128 bytes. `at`: the place of the lane's token and first channel; odd: the second one.
    static __device__ __forceinline__ void store_lines(const float (&v)[2][8], const PrefillArgs& args, i64 at, u32 token, u32 rows, u32 odd) {
        u32 words[2][4], first[4], second[4];
#pragma unroll
        for (u32 split = 0; split < 2; ++split)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const float low = v[split][2 * i], high = v[split][2 * i + 1];
                if (args.out_type == F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[split][i]) : "f"(high), "f"(low));
                else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[split][i]) : "f"(high), "f"(low));
            }
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 got = __shfl_xor_sync(0xffffffffu, odd ? words[0][i] : words[1][i], 4);
            first[i] = odd ? got : words[0][i], second[i] = odd ? words[1][i] : got;
        }
        u16* to = static_cast<u16*>(args.out) + at + (odd ? 32 - args.out_stride : 0);
        // Streaming, not to displace activations in the L2.
        if (token - odd < rows) __stcs(reinterpret_cast<uint4*>(to), make_uint4(first[0], first[1], first[2], first[3]));
        if (token - odd + 1 < rows) __stcs(reinterpret_cast<uint4*>(to + args.out_stride), make_uint4(second[0], second[1], second[2], second[3]));
    }
};

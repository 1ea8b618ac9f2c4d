// HALF on Hopper for more than 16 tokens: a warp decodes for one product while the one before it runs, and queues none behind it.
//
// Its A operands take 8 registers instead of 32, which leaves room for the sums of twice the tokens.
#pragma once
#include "narrow/block.cuh"
#include "base/wgmma.cuh"

// Until all but the last PENDING groups of products are done.
template <int PENDING>
__device__ __forceinline__ void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// A warp's decoded operands: of the product that comes next, and the words of its step.
template <class K>
struct DecodedStep {
    u32 a[2][4], words[K::Window::words];

    // The operand of product I of the step whose words are there.
    template <int I>
    __device__ __forceinline__ void decode() {
        u32 x[8];
        eight_words<K, I>(x, words);
        u32(&to)[4] = a[I % 2];
        to[0] = weights_of<K>(x[0], x[1]), to[1] = weights_of<K>(x[4], x[5]);
        to[2] = weights_of<K>(x[2], x[3]), to[3] = weights_of<K>(x[6], x[7]);
    }
    __device__ __forceinline__ void begin_step(u32 row, int lane) {
        load_words<K::half_bits>(words, SharedWords{row}, lane);
        decode<0>();
    }
};

// Starts product I of a half of k, on top of `sums` but for a k block's FIRST, and waits for the one before it. `b` is the low word of the
// descriptor of the half of k's B operand.
template <class K, int I, bool FIRST = false>
__device__ __forceinline__ void start_product(float (&sums)[4 * K::columns], DecodedStep<K>& decoded, u32 b) {
    constexpr u32 step = 2 * Record<K::arithmetic, K::tile_rows>::matrix_pitch / 16;
    u32(&a)[4] = decoded.a[I % 2];
    // All of A must be there before the fence: decoding that the compiler moves behind it makes ptxas add waits (C7519).
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
    warpgroup_fence();
    WarpgroupMma<8 * K::columns>::template run<!FIRST>(sums, a, u64(128 >> 4) << 32 | (b + I * step));
    warpgroup_commit();
    if constexpr (!FIRST) wait_for_products<1>();
}

// Adds a k block's sums to those of the k blocks before. `descales` is where the lane finds its tokens' factors.
template <class K>
__device__ __forceinline__ void add_products(Totals<K>& totals, float (&offsets)[K::columns][2], const float (&sums)[4 * K::columns], u32 descales) {
#pragma unroll
    for (int group = 0; group < K::columns; ++group) {
        u32 descale[2], offset[2];
        SharedWords{descales + group * 32}.run(descale, 0);
        if constexpr (K::byte_sums) SharedWords{descales + 4 * K::tile_rows + group * 32}.run(offset, 0);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float(&total)[2][2] = totals[group];
            total[0][i] = fmaf(sums[4 * group + i], __uint_as_float(descale[i]), total[0][i]);
            total[1][i] = fmaf(sums[4 * group + 2 + i], __uint_as_float(descale[i]), total[1][i]);
            if constexpr (K::byte_sums) offsets[group][i] += __uint_as_float(offset[i]);
        }
    }
}

// `left` k blocks whose activations are cached, of a warp that has a column. The first product of all is decoded.
template <class K, int STAGES, class Block>
__device__ __forceinline__ void multiply_cached_interleaved(Totals<K>& totals, float (&offsets)[K::columns][2], DecodedStep<K>& decoded, Block& block,
                                                       u32 record, u32 left) {
    using R = Record<HALF, K::tile_rows>;
    // In a cluster shared addresses carry the block's rank above what a descriptor has room for.
    u32 b = (record & 0x3ffffu) >> 4 | R::matrix_pitch >> 4 << 16;
    float sums[4 * K::columns];
    while (true) {
        const u32 at = __shfl_sync(0xffffffffu, b, 0), second = at + R::k_half_bytes / 16;  // so that the compiler knows them to be uniform
        const bool more = left > 1;
        start_product<K, 0, true>(sums, decoded, at);
        decoded.template decode<1>(), start_product<K, 1>(sums, decoded, at);
        decoded.template decode<2>(), start_product<K, 2>(sums, decoded, at);
        decoded.template decode<3>(), start_product<K, 3>(sums, decoded, at);
        decoded.begin_step(block.stage + step_at<K, 1>(1, block.lane), block.lane), start_product<K, 0>(sums, decoded, second);
        decoded.template decode<1>(), start_product<K, 1>(sums, decoded, second);
        decoded.template decode<2>(), start_product<K, 2>(sums, decoded, second);
        decoded.template decode<3>(), start_product<K, 3>(sums, decoded, second);
        block.next_stage();
        if (more) {
            wait_for_copies<STAGES - 1>();
            decoded.begin_step(block.stage + step_at<K, 1>(0, block.lane), block.lane);
        }
        wait_for_products<0>();
        add_products<K>(totals, offsets, sums, record + R::descale_at + 8 * (block.lane & 3));
        if (!more) break;
        --left;
        record += block.args.record_bytes, b += block.args.record_bytes / 16;
    }
}

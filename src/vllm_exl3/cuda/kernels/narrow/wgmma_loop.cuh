// HALF on Hopper: four warps multiply their columns together by wgmma, for 8 to 32 tokens at little more than what one product costs.
//
// A warp decodes its own tile column, 16 of the 64 rows of A, as in the other loop; only products wait for one another. The cached
// activations are the B operand where they lie.
#pragma once
#include "narrow/wgmma_interleaved.cuh"

// Starts the products of a half of k, on top of `sums` but for a k block's FIRST. `b` is the low word of the B operand's descriptor.
template <class K, bool FIRST>
__device__ __forceinline__ void start_k_half(float (&sums)[4 * K::columns], Step<K>& a, u32 b) {
    using Mma = WarpgroupMma<8 * K::columns>;
    constexpr u32 pitch = Record<K::arithmetic, K::tile_rows>::matrix_pitch, step = 2 * pitch / 16;
    const auto descriptor = [&](u32 product) { return u64(128 >> 4) << 32 | (b + product * step); };
    // All of A must be there before the fence: decoding that the compiler moves behind it makes ptxas add waits (C7519).
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
    warpgroup_fence();
    Mma::template run<!FIRST>(sums, a[0], descriptor(0));
    Mma::run(sums, a[1], descriptor(1));
    Mma::run(sums, a[2], descriptor(2));
    Mma::run(sums, a[3], descriptor(3));
    warpgroup_commit();
}

// The descales of the tokens' sums, and the offsets that decoding leaves out.
template <class K>
struct TokenFactors {
    float descale[K::columns][2], offset[K::columns][2];

    __device__ __forceinline__ void load(u32 descales) {
#pragma unroll
        for (int group = 0; group < K::columns; ++group) {
            u32 words[2];
            SharedWords{descales + group * 32}.run(words, 0);
            descale[group][0] = __uint_as_float(words[0]), descale[group][1] = __uint_as_float(words[1]);
            if constexpr (K::byte_sums) {
                SharedWords{descales + 4 * K::tile_rows + group * 32}.run(words, 0);
                offset[group][0] = __uint_as_float(words[0]), offset[group][1] = __uint_as_float(words[1]);
            }
        }
    }
};

// `left` k blocks whose activations are cached, of a warp that has columns. One step is decoded while the products of the one before it
// run; the first of all is in a[0].
template <class K, int J, int STAGES, class Block>
__device__ __forceinline__ void multiply_cached_wgmma(Totals<K> (&totals)[J], float (&offsets)[K::columns][2], Step<K> (&a)[2], Block& block,
                                                       u32 record, u32 left) {
    using R = Record<HALF, K::tile_rows>;
    const u32 descales = R::descale_at + 8 * (block.lane & 3);
    // The low word of the B operand's descriptor. In a cluster shared addresses carry the block's rank above what it has room for.
    u32 b = (record & 0x3ffffu) >> 4 | R::matrix_pitch >> 4 << 16;
    float sums[J][4 * K::columns];
    const auto decode = [&](int step) { decode_step<K>(a[step % 2], block.stage + step_at<K, J>(step, block.lane), block.lane); };
    while (true) {
        const u32 at = __shfl_sync(0xffffffffu, b, 0);  // so that the compiler knows it to be uniform
        TokenFactors<K> factors;
#pragma unroll
        for (int step = 0; step < 2 * J; ++step) {
            if (step < J) start_k_half<K, true>(sums[step % J], a[step % 2], at);
            else start_k_half<K, false>(sums[step % J], a[step % 2], at + R::k_half_bytes / 16);
            if (step + 1 < 2 * J) {
                if (step > 0) wait_for_products<1>();
                decode(step + 1);
            }
            if (step + 2 == 2 * J) factors.load(record + descales), block.next_stage();
        }
        const bool more = --left;
        if (more) {
            wait_for_copies<STAGES - 1>();
            wait_for_products<1>();
            decode(0);
        }
        wait_for_products<0>();
#pragma unroll
        for (int group = 0; group < K::columns; ++group) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float descale = factors.descale[group][i];
#pragma unroll
                for (int tile = 0; tile < J; ++tile) {
                    float(&total)[2][2] = totals[tile][group];
                    total[0][i] = fmaf(sums[tile][4 * group + i], descale, total[0][i]);
                    total[1][i] = fmaf(sums[tile][4 * group + 2 + i], descale, total[1][i]);
                }
                if constexpr (K::byte_sums) offsets[group][i] += factors.offset[group][i];
            }
        }
        if (!more) break;
        record += block.args.record_bytes, b += block.args.record_bytes / 16;
    }
}

// True where registers suffice to decode while activations are on their way.
template <class K, class Block> constexpr bool DECODES_EARLY = K::byte_sums && Block::single;

// Operands that are decoded before activations are there. With more than 16 tokens a warp has one tile column.
template <class K> constexpr bool INTERLEAVED = K::tile_rows > 16;
template <class K, bool = INTERLEAVED<K>> struct FirstDecoded { using type = DecodedStep<K>; };
template <class K> struct FirstDecoded<K, false> { using type = Step<K>[2]; };
template <class K> using FirstOf = typename FirstDecoded<K>::type;

template <class K, int J, int STAGES, class Block>
__device__ __forceinline__ void multiply_n_tile_wgmma(Block& block, const NTile& n_tile, u32 begin, u32 end) {
    const NarrowArgs& args = block.args;
    const NarrowShard& shard = args.shards[n_tile.shard];
    const bool columns = n_tile.channel + block.warp * J * 16 < shard.out_features;
    Totals<K> totals[J] = {};
    float offsets[K::columns][2] = {};
    for (u32 k_block = begin; k_block < end;) {
        FirstOf<K> first;
        RawOf<K> raw;
        const LoadState state = block.template begin_caching<K>(raw, k_block, shard);
        const auto decode_first = [&] {
            if (!columns) return;
            block.template wait_for_stage<K>(state);
            const u32 row = block.stage + step_at<K, J>(0, block.lane);
            if constexpr (INTERLEAVED<K>) first.begin_step(row, block.lane);
            else decode_step<K>(first[0], row, block.lane);
        };
        if (DECODES_EARLY<K, Block>) decode_first();
        block.template end_caching<K>(state, raw, k_block, shard);
        if (!DECODES_EARLY<K, Block>) decode_first();
        const u32 stop = min(end, block.cached_end), record = block.record_of(k_block);
        if (!columns) block.skip(stop - k_block);
        else if constexpr (INTERLEAVED<K>) multiply_cached_interleaved<K, STAGES>(totals[0], offsets, first, block, record, stop - k_block);
        else multiply_cached_wgmma<K, J, STAGES>(totals, offsets, first, block, record, stop - k_block);
        k_block = stop;
    }
#pragma unroll
    for (int tile = 0; tile < J; ++tile)
#pragma unroll
        for (int group = 0; group < K::columns; ++group)
#pragma unroll
            for (int i = 0; i < 2; ++i) totals[tile][group][0][i] += offsets[group][i], totals[tile][group][1][i] += offsets[group][i];
    hand_over_partial<K, J>(block, totals, n_tile, columns);
}

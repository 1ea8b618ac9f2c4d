// HALF on Hopper: four warps multiply their columns together by wgmma, for 8 to 32 tokens at little more than what one product costs.
//
// A warp decodes its own tile column, 16 of the 64 rows of A, as in the other loop; only products wait for one another. The kept
// activations are the B operand where they lie.
#pragma once
#include "narrow_many.cuh"

// Starts the products of a unit, on top of `sums` but for an item's FIRST. `b` is the low word of the B operand's descriptor.
template <class K, bool FIRST>
__device__ __forceinline__ void start_unit(float (&sums)[4 * K::columns], Step<K>& a, u32 b) {
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

// What the tokens' sums are multiplied by, and what is added then for all that decoding leaves out.
template <class K>
struct TokenFactors {
    float undo[K::columns][2], offset[K::columns][2];

    __device__ __forceinline__ void load(u32 undoes) {
#pragma unroll
        for (int group = 0; group < K::columns; ++group) {
            u32 words[2];
            SharedWords{undoes + group * 32}.run(words, 0);
            undo[group][0] = __uint_as_float(words[0]), undo[group][1] = __uint_as_float(words[1]);
            if constexpr (K::byte_sums) {
                SharedWords{undoes + 4 * K::tile_rows + group * 32}.run(words, 0);
                offset[group][0] = __uint_as_float(words[0]), offset[group][1] = __uint_as_float(words[1]);
            }
        }
    }
};

// `left` items whose activations are kept, of a warp that has columns. One step is decoded while the products of the one before it
// run; the first of all is in a[0].
template <class K, int J, int RING, class Block>
__device__ __forceinline__ void multiply_kept_together(Totals<K> (&totals)[J], float (&offsets)[K::columns][2], Step<K> (&a)[2], Block& block,
                                                       u32 record, u32 left) {
    using R = Record<HALF, K::tile_rows>;
    const u32 undoes = R::undo_at + 8 * (block.lane & 3);
    // The low word of the B operand's descriptor. In a cluster shared addresses carry the block's rank above what it has room for.
    u32 b = (record & 0x3ffffu) >> 4 | R::matrix_pitch >> 4 << 16;
    float sums[J][4 * K::columns];
    const auto decode = [&](int step) { decode_step<K>(a[step % 2], block.slot + step_at<K, J>(step, block.lane), block.lane); };
    while (true) {
        const u32 at = __shfl_sync(0xffffffffu, b, 0);  // so that the compiler knows it to be uniform
        TokenFactors<K> factors;
#pragma unroll
        for (int step = 0; step < 2 * J; ++step) {
            if (step < J) start_unit<K, true>(sums[step % J], a[step % 2], at);
            else start_unit<K, false>(sums[step % J], a[step % 2], at + R::unit_bytes / 16);
            if (step + 1 < 2 * J) {
                if (step > 0) wait_for_products<1>();
                decode(step + 1);
            }
            if (step + 2 == 2 * J) factors.load(record + undoes), block.next_slot();
        }
        const bool more = --left;
        if (more) {
            wait_for_fetch<RING - 1>();
            wait_for_products<1>();
            decode(0);
        }
        wait_for_products<0>();
#pragma unroll
        for (int group = 0; group < K::columns; ++group) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float undo = factors.undo[group][i];
#pragma unroll
                for (int tile = 0; tile < J; ++tile) {
                    float(&total)[2][2] = totals[tile][group];
                    total[0][i] = fmaf(sums[tile][4 * group + i], undo, total[0][i]);
                    total[1][i] = fmaf(sums[tile][4 * group + 2 + i], undo, total[1][i]);
                }
                if constexpr (K::byte_sums) offsets[group][i] += factors.offset[group][i];
            }
        }
        if (!more) break;
        record += block.args.record_bytes, b += block.args.record_bytes / 16;
    }
}

// Whether registers suffice to decode while activations are on their way.
template <class K, class Block> constexpr bool DECODES_EARLY = K::byte_sums && Block::single;

// What is decoded before activations are there. With more than 16 tokens a warp has one tile column.
template <class K> constexpr bool IN_TURNS = K::tile_rows > 16;
template <class K, bool = IN_TURNS<K>> struct FirstDecoded { using type = DecodedStep<K>; };
template <class K> struct FirstDecoded<K, false> { using type = Step<K>[2]; };
template <class K> using FirstOf = typename FirstDecoded<K>::type;

template <class K, int J, int RING, class Block>
__device__ __forceinline__ void multiply_strip_together(Block& block, const Strip& strip, u32 begin, u32 end) {
    const NarrowArgs& args = block.args;
    const NarrowShard& shard = args.shards[strip.shard];
    const bool columns = strip.channel + block.warp * J * 16 < shard.out_features;
    Totals<K> totals[J] = {};
    float offsets[K::columns][2] = {};
    for (u32 item = begin; item < end;) {
        FirstOf<K> first;
        RawOf<K> raw;
        const Asked asked = block.template begin_keeping<K>(raw, item, shard);
        const auto decode_first = [&] {
            if (!columns) return;
            block.template wait_for_slot<K>(asked);
            const u32 row = block.slot + step_at<K, J>(0, block.lane);
            if constexpr (IN_TURNS<K>) first.begin_step(row, block.lane);
            else decode_step<K>(first[0], row, block.lane);
        };
        if (DECODES_EARLY<K, Block>) decode_first();
        block.template end_keeping<K>(asked, raw, item, shard);
        if (!DECODES_EARLY<K, Block>) decode_first();
        const u32 stop = min(end, block.kept_end), record = block.record_of(item);
        if (!columns) block.skip(stop - item);
        else if constexpr (IN_TURNS<K>) multiply_kept_in_turns<K, RING>(totals[0], offsets, first, block, record, stop - item);
        else multiply_kept_together<K, J, RING>(totals, offsets, first, block, record, stop - item);
        item = stop;
    }
#pragma unroll
    for (int tile = 0; tile < J; ++tile)
#pragma unroll
        for (int group = 0; group < K::columns; ++group)
#pragma unroll
            for (int i = 0; i < 2; ++i) totals[tile][group][0][i] += offsets[group][i], totals[tile][group][1][i] += offsets[group][i];
    end_piece<K, J>(block, totals, strip, columns);
}

// The trellis GEMM for 17 tokens and more on Hopper: weights are decoded to fp16 in registers, as the A operand of wgmma,
// once for up to 128 tokens.
//
// One block per multiprocessor, four warpgroups in two pairs; a warpgroup holds 64 output channels, one tile column a warp.
// SPLIT_K = false: a strip is two Hadamard blocks, one a pair; all multiply the same activations.
// SPLIT_K = true:  a strip is one Hadamard block; the pairs take its units in turn and are added at its end. More strips,
//                  and half the sums to exchange between blocks: for layers that give a block few units.
// Units stream through a ring in shared memory, one for all warps that take the same units. While a warpgroup decodes, the
// others' products run, and its own of the unit before.
#pragma once
#include "barrier.cuh"
#include "fragments.cuh"
#include "pipeline.cuh"
#include "store.cuh"
#include "wgmma.cuh"

constexpr int WIDE_THREADS = 512;
constexpr int PAIR_THREADS = WIDE_THREADS / 2;
constexpr int PAIR_WARPS = PAIR_THREADS / 32;
constexpr u32 OUTPUT_PITCH = STRIP + 4;

// The block's ring of units.
struct WideRing {
    u32 base, stride, weight_bytes, stages, strip_halves;
    u32 full, empty;        // barriers, `stages` each
    u32 slot, phase, stage; // being read: its number, its barriers' parity, its address

    __device__ __forceinline__ void next() {
        ++slot, stage += stride;
        if (slot == stages) slot = 0, stage = base, phase ^= 1;
    }
};

// What the first warp keeps besides: which unit goes to which slot next.
struct WideProducer {
    Cursor cursor;
    u32 filled, phase;  // slot, and the parity of its empty barrier
    u32 step;           // from one unit of this ring to the next

    __device__ __forceinline__ void next(const LinearArgs& args, const WideRing& ring) {
        if (++filled == ring.stages) filled = 0, phase ^= 1;
        cursor.advance(args, step);
    }
    template <bool WEIGHTS, bool ACTIVATIONS>
    __device__ __forceinline__ void fetch(const WideRing& ring) const {
        const u32 barrier = ring.full + 8 * filled, target = ring.base + filled * ring.stride;
        const u32 pitch = ring.strip_halves * cursor.row_bytes + ROW_PAD;
        if (!one_lane()) return;
        if (WEIGHTS) {
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                         ::"r"(barrier), "r"(4 * cursor.strip_bytes + cursor.activation_bytes) : "memory");
#pragma unroll
            for (int row = 0; row < 4; ++row)
                copy_to_shared(target + row * pitch, cursor.weights + static_cast<u64>(row) * cursor.pitch, cursor.strip_bytes, barrier);
        }
        if (ACTIVATIONS) copy_to_shared(target + ring.weight_bytes, cursor.activations, cursor.activation_bytes, barrier);
    }
};

// The part of a strip that one block computed.
struct WideSegment {
    u32 shard, strip, strip_begin, strip_end;
    bool complete;
};

struct WideBlock {
    const LinearArgs& args;
    float* staging;  // shared: sums on their way between the pairs, then outputs
    u32* last;       // shared
    WideRing ring;
    WideProducer producer;
    u32 unit;        // unit that is multiplied next
    u32 held;        // slots that are read before the first of them is free: decoding runs one ahead
    int pair, warp, lane;  // warp among those that share the ring

    // Fills the oldest slot again, once every warp has left it, and waits for the slot that is read next.
    __device__ __forceinline__ void wait_for_unit() {
        if (held) {
            --held;
        } else if (warp == 0) {
            if (producer.cursor.valid()) {
                mbarrier_wait(ring.empty + 8 * producer.filled, producer.phase);
                producer.template fetch<true, true>(ring);
            }
            producer.next(args, ring);
        }
        mbarrier_wait(ring.full + 8 * ring.slot, ring.phase);
    }
};

#include "wide_epilogue.cuh"

// The A operand of the unit in the slot being read: four products' worth.
template <class K, bool SPLIT_K>
__device__ __forceinline__ void decode_unit(u32 (&a)[4][4], const WideBlock& block) {
    using W = typename K::Window;
    constexpr u32 tile_bytes = 4 * W::tile_words, row_bytes = (SPLIT_K ? 2 : 4) * HALF_TILES * tile_bytes + ROW_PAD;
    u32 words[W::words];
    load_words<K::half_bits>(words, SharedWords{block.ring.stage + (block.lane & 3) * row_bytes + block.warp * tile_bytes}, block.lane);
    decode_step<K, 0>(a[0], words);
    decode_step<K, 1>(a[1], words);
    decode_step<K, 2>(a[2], words);
    decode_step<K, 3>(a[3], words);
}

template <int TOKENS>
__device__ __forceinline__ void multiply_unit(float (&sums)[TOKENS / 2], u32 (&a)[4][4], const WideRing& ring) {
    const u64 b = matrix_descriptor<TOKENS * 16>(ring.stage + ring.weight_bytes);
    // All of A must be there before the fence: decoding that the compiler moves behind it makes ptxas add waits (C7519).
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
    warpgroup_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) WarpgroupMma<TOKENS>::run(sums, a[i], b + 2 * i * TOKENS);
    warpgroup_commit();
}

template <class K, int TOKENS, bool SPLIT_K>
__device__ __forceinline__ void run_wide_segment(WideBlock& block, const WideSegment& segment, u32 segment_end) {
    constexpr u32 step = SPLIT_K ? 2 : 1;
    float sums[TOKENS / 2] = {};
    u32 even[4][4], odd[4][4];  // one is multiplied while the other is decoded
    const auto multiply = [&](u32 (&current)[4][4], u32 (&next)[4][4]) {
        multiply_unit<TOKENS>(sums, current, block.ring);
        const u32 empty = block.ring.empty + 8 * block.ring.slot;
        block.ring.next();
        block.unit += step;
        const bool more = block.unit < segment_end;
        if (more) {
            block.wait_for_unit();
            decode_unit<K, SPLIT_K>(next, block);
        }
        warpgroup_wait();
        if (block.lane == 0) mbarrier_arrive(empty);
        return more;
    };
    if (block.unit < segment_end) {
        block.wait_for_unit();
        decode_unit<K, SPLIT_K>(even, block);
        while (multiply(even, odd) && multiply(odd, even)) {}
    }
    finish_wide<TOKENS, SPLIT_K>(sums, block, segment);
}

template <class... Ks> struct WideKinds {};

template <int TOKENS, bool SPLIT_K, class... Ks>
__device__ __forceinline__ void dispatch_wide(WideKinds<Ks...>, u32 kind, WideBlock& block, const WideSegment& segment, u32 end) {
    u32 index = 0;
    ((index++ == kind ? run_wide_segment<Ks, TOKENS, SPLIT_K>(block, segment, end) : void()), ...);
}

template <int TOKENS, bool SPLIT_K, class List>
__device__ __forceinline__ void linear_wide(const LinearArgs& args) {
    extern __shared__ __align__(128) u8 memory[];
    constexpr u32 groups = SPLIT_K ? 2 : 1, group_warps = WIDE_THREADS / 32 / groups;  // warps that share a ring
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const u32 group = warp / group_warps;
    const u32 begin = range_begin(args, blockIdx.x), end = range_begin(args, blockIdx.x + 1);
    WideBlock block{args};
    block.pair = warp / PAIR_WARPS, block.warp = warp % group_warps, block.lane = lane;

    // Shared memory: a flag and barriers, staging, the rings.
    constexpr u32 staging_at = 512;
    block.last = reinterpret_cast<u32*>(memory);
    block.staging = reinterpret_cast<float*>(memory + staging_at);
    WideRing& ring = block.ring;
    ring.stages = args.ring_units;
    ring.strip_halves = SPLIT_K ? 2 : 4;
    ring.weight_bytes = ring.strip_halves * args.half_stride;
    ring.stride = ring.weight_bytes + args.activation_stride;
    ring.full = shared_address(memory) + 16 + group * 16 * ring.stages, ring.empty = ring.full + 8 * ring.stages;
    ring.base = ring.stage = shared_address(memory) + staging_at + staging_bytes<TOKENS, SPLIT_K>() + group * ring.stages * ring.stride;
    ring.slot = 0, ring.phase = 0;
    if (block.warp == 0 && lane == 0) {
        for (u32 i = 0; i < ring.stages; ++i) mbarrier_init(ring.full + 8 * i, 1), mbarrier_init(ring.empty + 8 * i, group_warps);
        mbarrier_init_visible();
    }
    __syncthreads();

    WideProducer& producer = block.producer;
    producer.cursor.unit = begin + group, producer.cursor.end = end;
    producer.filled = 0, producer.phase = 0, producer.step = groups;
    WideProducer first{};
    if (block.warp == 0) {
        if (producer.cursor.valid()) producer.cursor.seek(args);
        first = producer;
        for (u32 i = 0; i < ring.stages; ++i, producer.next(args, ring))
            if (producer.cursor.valid()) producer.template fetch<true, false>(ring);
    }
    let_next_start();
    wait_for_previous();
    if (block.warp == 0) {
        for (u32 i = 0; i < ring.stages; ++i, first.next(args, ring))
            if (first.cursor.valid()) first.template fetch<false, true>(ring);
        producer.phase = 0;  // the first refill waits for the first use
    }

    WideSegment segment{};
    block.unit = begin + group, block.held = 2;
    for (u32 at = begin; at < end;) {
        while (segment.shard + 1 < args.shard_count && at >= args.shards[segment.shard + 1].first_unit) ++segment.shard;
        const ShardArgs& shard = args.shards[segment.shard];
        const u32 depth = shard.in_features / UNIT_IN;
        segment.strip = (at - shard.first_unit) / depth;
        segment.strip_begin = shard.first_unit + segment.strip * depth;
        segment.strip_end = segment.strip_begin + depth;
        const u32 segment_end = min(end, segment.strip_end);
        segment.complete = at == segment.strip_begin && segment_end == segment.strip_end;
        dispatch_wide<TOKENS, SPLIT_K>(List{}, shard.kind, block, segment, segment_end);
        at = segment_end;
    }
}

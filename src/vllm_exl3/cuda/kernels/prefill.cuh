// The trellis GEMM for many tokens on Hopper: weights are decoded to fp16 in registers, as the A operand of wgmma, once for
// up to 256 tokens.
//
// One warp of the first warpgroup fetches units into a ring. The others multiply in pairs, a pair one Hadamard block: 64
// output channels a warpgroup, one tile column a warp. A warpgroup has one product in flight while it decodes the weights of
// the next: a second product queued behind the first would stall the warp until the tensor cores take it, and every
// warpgroup would decode at the same time.
#pragma once
#include "barrier.cuh"
#include "prefill_outputs.cuh"
#include "prefill_parts.cuh"
#include "wgmma.cuh"

constexpr int PRODUCERS = 128;

// A ring of units: weights as four rows of the block's tiles, then activations.
struct UnitRing {
    u32 base, stride, stages, full, empty;  // shared addresses; barriers, `stages` of each sort
    u32 slot = 0, phase = 0, at;            // the slot that is next, the parity of its barrier, its address

    __device__ __forceinline__ UnitRing(const PrefillArgs& args, u32 memory, u32 staging_bytes, u32 activation_bytes) {
        stages = args.stages, full = memory + 16, empty = full + 8 * stages;
        base = at = memory + BARRIER_BYTES + staging_bytes;
        stride = args.weight_bytes + activation_bytes;
    }
    __device__ __forceinline__ void next() {
        ++slot, at += stride;
        if (slot == stages) slot = 0, at = base, phase ^= 1;
    }
};

// Where the units of a segment lie, and how they are fetched.
template <class S>
struct UnitSource {
    static constexpr u32 share = S::activation_bytes / S::CLUSTER;  // of a unit's activations, that this block brings to all
    const u8* weights;
    const u8* activations;
    u64 pitch;                 // bytes from one k-tile row to the next
    u32 bytes, row_bytes;      // of a k-tile row: what there is, and its place in the ring
    u32 weight_bytes, offset;  // of a unit's weights in the ring; of the block's share of the activations behind them

    __device__ __forceinline__ UnitSource(const PrefillArgs& args, const PrefillSegment& segment, u32 rank) {
        const PrefillShard& shard = args.shards[segment.shard];
        const u32 strip_bytes = 8 * 16 * shard.half_bits, blocks = shard.out_features / STRIP;
        // Beyond the shard's last Hadamard block, a block of the cluster repeats it and a pair has nothing.
        const u32 block = min(S::STRIPS * segment.strip + S::PAIRS * rank, blocks - 1);
        bytes = min(u32(S::PAIRS), blocks - block) * strip_bytes, row_bytes = S::PAIRS * strip_bytes + WEIGHT_PAD;
        pitch = static_cast<u64>(blocks) * strip_bytes;
        weights = reinterpret_cast<const u8*>(shard.trellis) + 4 * segment.begin * pitch + block * strip_bytes;
        weight_bytes = args.weight_bytes, offset = rank * share;
        activations = args.activations + offset + S::activation_bytes *
            static_cast<u64>((segment.shard * args.row_tiles + segment.row_tile) * (args.in_features / UNIT_IN) + segment.begin);
    }
    __device__ __forceinline__ void fetch_weights(const UnitRing& ring) {
        const u32 barrier = ring.full + 8 * ring.slot;
        if (one_lane()) {
            mbarrier_expect(barrier, 4 * bytes + S::activation_bytes);
#pragma unroll
            for (int row = 0; row < 4; ++row) copy_to_shared(ring.at + row * row_bytes, weights + row * pitch, bytes, barrier);
        }
        weights += 4 * pitch;
    }
    __device__ __forceinline__ void fetch_activations(const UnitRing& ring) {
        const u32 barrier = ring.full + 8 * ring.slot, target = ring.at + weight_bytes + offset;
        if (one_lane()) {
            if constexpr (S::CLUSTER == 1) copy_to_shared(target, activations, share, barrier);
            else copy_to_cluster(target, activations, share, barrier, (1 << S::CLUSTER) - 1);
        }
        activations += S::activation_bytes;
    }
};

// Fetches every unit of the cluster's segments. One warp.
template <class S>
__device__ __forceinline__ void produce(const PrefillArgs& args, UnitRing ring, u32 rank) {
    PrefillWalk walk(args, blockIdx.x / S::CLUSTER, gridDim.x / S::CLUSTER);
    PrefillSegment segment;
    ring.phase = 1;  // the first round finds empty slots
    for (bool first = true; walk.next(args, segment); first = false) {
        UnitSource<S> source(args, segment, rank);
        u32 unit = segment.begin;
        if (first) {
            // Weights never change; all else is written by the kernel ahead.
            const u32 ahead = min(ring.stages, segment.end - unit);
            UnitRing early = ring;
            for (u32 i = 0; i < ahead; ++i, early.next()) source.fetch_weights(early);
            wait_for_previous();
            for (u32 i = 0; i < ahead; ++i, ring.next()) source.fetch_activations(ring);
            unit += ahead;
        }
        for (; unit < segment.end; ++unit, ring.next()) {
            mbarrier_wait(ring.empty + 8 * ring.slot, ring.phase);
            source.fetch_weights(ring);
            source.fetch_activations(ring);
        }
    }
    // The block must not leave before the others of its cluster have written to it for the last time. Their copies are there before its
    // own warps release a slot; what comes last is that others release theirs, at its `empty` barriers. A slot that was never filled has
    // nothing to wait for: its barrier is in its first phase, and the parity asked for is that of the one before.
    if constexpr (S::CLUSTER > 1)
#pragma unroll 1
        for (u32 i = 0; i < ring.stages; ++i, ring.next()) mbarrier_wait(ring.empty + 8 * ring.slot, ring.phase);
}

struct PrefillBlock {
    const PrefillArgs& args;
    UnitRing ring;
    Staging& staging; // shared, the pair's
    CutTiles& cut;    // the same
    u32 place;        // which Hadamard block of the strip is the pair's
    int pair, warp, lane, thread;  // the latter three in the pair

    __device__ __forceinline__ void sync() const { sync_threads(1 + pair, PAIR_THREADS); }
};

// Starts a product and waits for the one before it. A is complete before it and `words` are read after it. `b` is the low
// word of B's descriptor, whose address moves without a carry.
template <int TOKENS, int WORDS>
__device__ __forceinline__ void multiply(float (&sums)[TOKENS / 2], u32 (&a)[4], u32 b, u32 (&words)[WORDS]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
    warpgroup_fence();
    WarpgroupMma<TOKENS>::run(sums, a, matrix_descriptor<0>(0) | b);
    warpgroup_commit();
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
#pragma unroll
    for (int i = 0; i < WORDS; ++i) asm volatile("" : "+r"(words[i]));
}

template <class K, int PAIRS>
__device__ __forceinline__ void load_unit(u32 (&words)[K::Window::words], const PrefillBlock& block) {
    constexpr u32 tile_bytes = 4 * K::Window::tile_words, row_bytes = PAIRS * 8 * tile_bytes + WEIGHT_PAD;
    load_words<K::half_bits>(words, SharedWords{block.ring.at + (block.lane & 3) * row_bytes + (PAIR_WARPS * block.pair + block.warp) * tile_bytes},
                             block.lane);
}

template <int CLUSTER>
__device__ __forceinline__ void release(u32 empty, int lane) {
    if constexpr (CLUSTER == 1) {
        if (lane == 0) mbarrier_arrive(empty);
    } else {
        if (lane < CLUSTER) mbarrier_arrive_at(empty, lane);
    }
}

// Shared memory that ends of tiles take.
template <class S> constexpr u32 end_bytes = S::PAIRS == 1 ? Outputs<S::TOKENS>::bytes : S::PAIRS * STAGING_BYTES;

// Multiplies a segment of shards of one kind. Which of the overloads serves is the shape's choice.
template <class K, int TOKENS, int PAIRS, int CLUSTER>
__device__ __forceinline__ void consume(K, Shape<TOKENS, PAIRS, CLUSTER>, PrefillBlock& block, const PrefillSegment& segment) {
    using S = Shape<TOKENS, PAIRS, CLUSTER>;
    float sums[TOKENS / 2] = {};
    u32 even[4], odd[4], words[K::Window::words];
    UnitRing& ring = block.ring;
    fetch_scales<S>(block, segment);
    mbarrier_wait(ring.full + 8 * ring.slot, ring.phase);
    load_unit<K, S::PAIRS>(words, block);
    decode_step<K, 0>(even, words);
    u32 before = 0;  // the empty barrier of the unit before, whose last product is still in flight
    for (u32 left = segment.end - segment.begin; left != 0; --left) {
        // In a cluster a shared address names its block above bit 24, where a descriptor has other things.
        const u32 b = u32(matrix_descriptor<TOKENS * 16>((ring.at + block.args.weight_bytes) & 0x3ffff));
        multiply<TOKENS>(sums, even, b, words);
        if (before) release<S::CLUSTER>(before, block.lane);
        decode_step<K, 1>(odd, words);
        multiply<TOKENS>(sums, odd, b + 2 * TOKENS, words);
        decode_step<K, 2>(even, words);
        multiply<TOKENS>(sums, even, b + 4 * TOKENS, words);
        decode_step<K, 3>(odd, words);
        before = ring.empty + 8 * ring.slot;
        ring.next();
        // Behind the last unit this reads a slot that holds nothing of interest, and nobody uses it.
        if (left > 1) mbarrier_wait(ring.full + 8 * ring.slot, ring.phase);
        load_unit<K, S::PAIRS>(words, block);
        multiply<TOKENS>(sums, odd, b + 6 * TOKENS, words);
        decode_step<K, 0>(even, words);
    }
    warpgroup_wait();
    release<S::CLUSTER>(before, block.lane);
    if constexpr (PAIRS > 1) {
        finish_tile<S>(sums, block, segment);
    } else if (has_block<S>(block.args, segment, block.place)) {
        const u32 first_row = segment.row_tile * TOKENS;
        if (segment.complete)
            Outputs<TOKENS>(reinterpret_cast<u8*>(&block.staging)).end(sums, block, block.args.shards[segment.shard], S::STRIPS * segment.strip + block.place,
                                                                      first_row, min(u32(TOKENS), block.args.rows - first_row));
        else leave_sums<S>(sums, block, segment);
    }
}

template <class S, class... Ks>
__device__ __forceinline__ void dispatch_kind(PrefillKinds<Ks...>, PrefillBlock& block, const PrefillSegment& segment) {
    const u32 kind = block.args.shards[segment.shard].kind;
    u32 index = 0;
    ((index++ == kind ? consume(Ks{}, S{}, block, segment) : void()), ...);
}

// COPYING, REGISTERS: registers of a thread of the first warpgroup, and of those that multiply.
template <class S, int COPYING, int REGISTERS, class List>
__device__ __forceinline__ void prefill(const PrefillArgs& args) {
    // Warpgroups get only what the block was started with: asking for more waits forever.
    constexpr int threads = PRODUCERS + S::PAIRS * PAIR_THREADS, started = 65536 / threads / 8 * 8;
    static_assert(PRODUCERS * COPYING + S::PAIRS * PAIR_THREADS * REGISTERS <= threads * started, "more registers than the block has");
    extern __shared__ __align__(128) u8 memory[];
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const u32 rank = S::CLUSTER == 1 ? 0 : rank_in_cluster();
    UnitRing ring(args, shared_address(memory), end_bytes<S>, S::activation_bytes);
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < ring.stages; ++i)
            mbarrier_init(ring.full + 8 * i, 1), mbarrier_init(ring.empty + 8 * i, PAIR_WARPS * S::STRIPS);
        mbarrier_init_visible();
    }
    if constexpr (S::CLUSTER == 1) __syncthreads();
    else cluster_started(), wait_for_cluster();
    let_next_start();
    if (warp < PRODUCERS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPYING));
        if (warp == 0) produce<S>(args, ring, rank);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
        const u32 pair = (warp - PRODUCERS / 32) / PAIR_WARPS;
        PrefillBlock block{args, ring, *reinterpret_cast<Staging*>(memory + BARRIER_BYTES + pair * STAGING_BYTES),
                           *reinterpret_cast<CutTiles*>(memory + BARRIER_BYTES - (pair + 1) * sizeof(CutTiles))};
        block.pair = pair, block.warp = (warp - PRODUCERS / 32) % PAIR_WARPS, block.lane = lane;
        block.thread = 32 * block.warp + lane, block.place = rank * S::PAIRS + block.pair;
        // Parts of larger tiles are ended by a launch of their own: it has more threads, and so much to read hides what it costs.
        const bool ends = S::PAIRS > 1 && args.arrivals != nullptr;
        if (ends && block.thread == 32) block.cut.find(args, blockIdx.x / S::CLUSTER);
        wait_for_previous();
        if constexpr (S::PAIRS == 1) Outputs<S::TOKENS>(memory + BARRIER_BYTES).write_matrix(block.thread);
        PrefillWalk walk(args, blockIdx.x / S::CLUSTER, gridDim.x / S::CLUSTER);
        PrefillSegment segment;
        while (walk.next(args, segment)) dispatch_kind<S>(List{}, block, segment);
        if constexpr (S::PAIRS > 1) {
            if (ends) end_parts<S>(block);
        }
    }
}

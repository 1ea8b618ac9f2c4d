// The trellis GEMM for many tokens on Hopper: weights are decoded to fp16 in registers, as the A operand of wgmma, once for
// up to 256 tokens.
//
// One warp of the first warpgroup fetches k blocks into a pipeline. The others multiply in pairs, a pair one Hadamard block: 64
// output channels a warpgroup, one tile column a warp. A warpgroup has one product in flight while it decodes the weights of
// the next: a second product queued behind the first would stall the warp until the tensor cores take it, and every
// warpgroup would decode at the same time.
#pragma once
#include "base/barrier.cuh"
#include "prefill/epilogue_mma.cuh"
#include "prefill/reduction.cuh"
#include "base/mainloop.cuh"

constexpr int PRODUCER_THREADS = 128;

// A pipeline of k blocks: weights as four rows of the block's tiles, then activations.
struct PrefillPipeline {
    u32 base, stride, stages, full, empty;  // shared addresses; barriers, `stages` of each sort
    u32 index = 0, phase = 0, stage;            // the stage that is next, the parity of its barrier, its address

    __device__ __forceinline__ PrefillPipeline(const PrefillArgs& args, u32 memory, u32 staging_bytes, u32 activation_bytes) {
        stages = args.stages, full = memory + 16, empty = full + 8 * stages;
        base = stage = memory + BARRIER_BYTES + staging_bytes;
        stride = args.weight_bytes + activation_bytes;
    }
    __device__ __forceinline__ void next() {
        ++index, stage += stride;
        if (index == stages) index = 0, stage = base, phase ^= 1;
    }
};

// Where the k blocks of a work tile lie, and how they are fetched.
template <class S>
struct KBlockLoader {
    static constexpr u32 multicast_bytes = S::activation_bytes / S::CLUSTER;  // of a k block's activations, that this block brings to all
    const u8* weights;
    const u8* activations;
    u64 pitch;                 // bytes from one k-tile row to the next
    u32 bytes, row_bytes;      // of a k-tile row: what there is, and its place in the pipeline
    u32 weight_bytes, offset;  // of a k block's weights in the pipeline; of the block's part of the activations behind them

    __device__ __forceinline__ KBlockLoader(const PrefillArgs& args, const PrefillWorkTile& work, u32 rank) {
        const PrefillShard& shard = args.shards[work.shard];
        const u32 n_block_bytes = 8 * 16 * shard.half_bits, blocks = shard.out_features / HADAMARD_SIZE;
        // Beyond the shard's last Hadamard block, a block of the cluster repeats it and a pair has nothing.
        const u32 block = min(S::N_BLOCKS * work.n_tile + S::PAIRS * rank, blocks - 1);
        bytes = min(u32(S::PAIRS), blocks - block) * n_block_bytes, row_bytes = S::PAIRS * n_block_bytes + ROW_PAD;
        pitch = static_cast<u64>(blocks) * n_block_bytes;
        weights = reinterpret_cast<const u8*>(shard.trellis) + 4 * work.begin * pitch + block * n_block_bytes;
        weight_bytes = args.weight_bytes, offset = rank * multicast_bytes;
        activations = args.activations + offset + S::activation_bytes *
            static_cast<u64>((work.shard * args.row_tiles + work.row_tile) * (args.in_features / BLOCK_K) + work.begin);
    }
    __device__ __forceinline__ void fetch_weights(const PrefillPipeline& pipeline) {
        const u32 barrier = pipeline.full + 8 * pipeline.index;
        if (elect_one()) {
            mbarrier_arrive_expect_tx(barrier, 4 * bytes + S::activation_bytes);
#pragma unroll
            for (int row = 0; row < 4; ++row) bulk_copy(pipeline.stage + row * row_bytes, weights + row * pitch, bytes, barrier);
        }
        weights += 4 * pitch;
    }
    __device__ __forceinline__ void fetch_activations(const PrefillPipeline& pipeline) {
        const u32 barrier = pipeline.full + 8 * pipeline.index, target = pipeline.stage + weight_bytes + offset;
        if (elect_one()) {
            if constexpr (S::CLUSTER == 1) bulk_copy(target, activations, multicast_bytes, barrier);
            else bulk_copy_multicast(target, activations, multicast_bytes, barrier, (1 << S::CLUSTER) - 1);
        }
        activations += S::activation_bytes;
    }
};

// Fetches every k block of the cluster's work tiles. One warp.
template <class S>
__device__ __forceinline__ void produce(const PrefillArgs& args, PrefillPipeline pipeline, u32 rank) {
    PrefillScheduler scheduler(args, blockIdx.x / S::CLUSTER, gridDim.x / S::CLUSTER);
    PrefillWorkTile work;
    pipeline.phase = 1;  // the first round finds empty stages
    for (bool first = true; scheduler.next(args, work); first = false) {
        KBlockLoader<S> source(args, work, rank);
        u32 k_block = work.begin;
        if (first) {
            // Weights never change; all else is written by the kernel ahead.
            const u32 ahead = min(pipeline.stages, work.end - k_block);
            PrefillPipeline early = pipeline;
            for (u32 i = 0; i < ahead; ++i, early.next()) source.fetch_weights(early);
            wait_on_dependent_grids();
            for (u32 i = 0; i < ahead; ++i, pipeline.next()) source.fetch_activations(pipeline);
            k_block += ahead;
        }
        for (; k_block < work.end; ++k_block, pipeline.next()) {
            mbarrier_wait(pipeline.empty + 8 * pipeline.index, pipeline.phase);
            source.fetch_weights(pipeline);
            source.fetch_activations(pipeline);
        }
    }
    // The block must not leave before the others of its cluster have written to it for the last time. Their copies are there before its
    // own warps release a stage; what comes last is that others release theirs, at its `empty` barriers. A stage that was never filled has
    // nothing to wait for: its barrier is in its first phase, and the parity asked for is that of the one before.
    if constexpr (S::CLUSTER > 1)
#pragma unroll 1
        for (u32 i = 0; i < pipeline.stages; ++i, pipeline.next()) mbarrier_wait(pipeline.empty + 8 * pipeline.index, pipeline.phase);
}

struct PrefillBlock {
    const PrefillArgs& args;
    PrefillPipeline pipeline;
    Staging& staging; // shared, the pair's
    SplitTiles& split_tiles;    // the same
    u32 place;        // which Hadamard block of the n tile is the pair's
    int pair, warp, lane, thread;  // the latter three in the pair

    __device__ __forceinline__ void sync() const { named_barrier_sync(1 + pair, PAIR_THREADS); }
};

// `b` is the low word of B's descriptor, whose address moves without a carry.
template <int TOKENS, int WORDS>
__device__ __forceinline__ void multiply(float (&sums)[TOKENS / 2], u32 (&a)[4], u32 b, u32 (&words)[WORDS]) {
    issue_product<WarpgroupMma<TOKENS>>(sums, a, matrix_descriptor<0>(0) | b, words);
}

template <class K, int PAIRS>
__device__ __forceinline__ void load_k_block(u32 (&words)[K::Window::words], const PrefillBlock& block) {
    constexpr u32 tile_bytes = 4 * K::Window::tile_words, row_bytes = PAIRS * 8 * tile_bytes + ROW_PAD;
    load_words<K::half_bits>(words, SharedWords{block.pipeline.stage + (block.lane & 3) * row_bytes + (PAIR_WARPS * block.pair + block.warp) * tile_bytes},
                             block.lane);
}

template <int CLUSTER>
__device__ __forceinline__ void release(u32 empty, int lane) {
    if constexpr (CLUSTER == 1) {
        if (lane == 0) mbarrier_arrive(empty);
    } else {
        if (lane < CLUSTER) mbarrier_arrive_remote(empty, lane);
    }
}

// Shared memory of epilogues.
template <class S> constexpr u32 epilogue_bytes = S::PAIRS == 1 ? HadamardEpilogue<S::TOKENS>::bytes : S::PAIRS * STAGING_BYTES;

// Multiplies a work tile of shards of one kind. Which of the overloads serves is the shape's choice.
template <class K, int TOKENS, int PAIRS, int CLUSTER>
__device__ __forceinline__ void consume(K, Shape<TOKENS, PAIRS, CLUSTER>, PrefillBlock& block, const PrefillWorkTile& work) {
    using S = Shape<TOKENS, PAIRS, CLUSTER>;
    float sums[TOKENS / 2] = {};
    u32 even[4], odd[4], words[K::Window::words];
    PrefillPipeline& pipeline = block.pipeline;
    fetch_scales<S>(block, work);
    mbarrier_wait(pipeline.full + 8 * pipeline.index, pipeline.phase);
    load_k_block<K, S::PAIRS>(words, block);
    decode_step<K, 0>(even, words);
    u32 before = 0;  // the empty barrier of the k block before, whose last product is still in flight
    for (u32 left = work.end - work.begin; left != 0; --left) {
        // In a cluster a shared address names its block above bit 24, where a descriptor has other things.
        const u32 b = u32(matrix_descriptor<TOKENS * 16>((pipeline.stage + block.args.weight_bytes) & 0x3ffff));
        multiply<TOKENS>(sums, even, b, words);
        if (before) release<S::CLUSTER>(before, block.lane);
        decode_step<K, 1>(odd, words);
        multiply<TOKENS>(sums, odd, b + 2 * TOKENS, words);
        decode_step<K, 2>(even, words);
        multiply<TOKENS>(sums, even, b + 4 * TOKENS, words);
        decode_step<K, 3>(odd, words);
        before = pipeline.empty + 8 * pipeline.index;
        pipeline.next();
        // Behind the last k block this reads a stage that has undefined contents, and nobody uses it.
        if (left > 1) mbarrier_wait(pipeline.full + 8 * pipeline.index, pipeline.phase);
        load_k_block<K, S::PAIRS>(words, block);
        multiply<TOKENS>(sums, odd, b + 6 * TOKENS, words);
        decode_step<K, 0>(even, words);
    }
    warpgroup_wait();
    release<S::CLUSTER>(before, block.lane);
    if constexpr (PAIRS > 1) {
        finish_tile<S>(sums, block, work);
    } else if (has_block<S>(block.args, work, block.place)) {
        const u32 first_row = work.row_tile * TOKENS;
        if (work.complete)
            HadamardEpilogue<TOKENS>(reinterpret_cast<u8*>(&block.staging)).run(sums, block, block.args.shards[work.shard], S::N_BLOCKS * work.n_tile + block.place,
                                                                      first_row, min(u32(TOKENS), block.args.rows - first_row));
        else store_partials<S>(sums, block, work);
    }
}

template <class S, class... Ks>
__device__ __forceinline__ void dispatch_kind(PrefillKinds<Ks...>, PrefillBlock& block, const PrefillWorkTile& work) {
    const u32 kind = block.args.shards[work.shard].kind;
    u32 index = 0;
    ((index++ == kind ? consume(Ks{}, S{}, block, work) : void()), ...);
}

// COPYING, REGISTERS: registers of a thread of the first warpgroup, and of those that multiply.
template <class S, int COPYING, int REGISTERS, class List>
__device__ __forceinline__ void prefill(const PrefillArgs& args) {
    // Warpgroups get only what the block was started with: asking for more waits forever.
    constexpr int threads = PRODUCER_THREADS + S::PAIRS * PAIR_THREADS, started = 65536 / threads / 8 * 8;
    static_assert(PRODUCER_THREADS * COPYING + S::PAIRS * PAIR_THREADS * REGISTERS <= threads * started, "more registers than the block has");
    extern __shared__ __align__(128) u8 memory[];
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const u32 rank = S::CLUSTER == 1 ? 0 : cluster_rank();
    PrefillPipeline pipeline(args, shared_address(memory), epilogue_bytes<S>, S::activation_bytes);
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < pipeline.stages; ++i)
            mbarrier_init(pipeline.full + 8 * i, 1), mbarrier_init(pipeline.empty + 8 * i, PAIR_WARPS * S::N_BLOCKS);
        fence_barrier_init();
    }
    if constexpr (S::CLUSTER == 1) __syncthreads();
    else cluster_arrive_relaxed(), cluster_wait();
    launch_dependent_grids();
    if (warp < PRODUCER_THREADS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPYING));
        if (warp == 0) produce<S>(args, pipeline, rank);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
        const u32 pair = (warp - PRODUCER_THREADS / 32) / PAIR_WARPS;
        PrefillBlock block{args, pipeline, *reinterpret_cast<Staging*>(memory + BARRIER_BYTES + pair * STAGING_BYTES),
                           *reinterpret_cast<SplitTiles*>(memory + BARRIER_BYTES - (pair + 1) * sizeof(SplitTiles))};
        block.pair = pair, block.warp = (warp - PRODUCER_THREADS / 32) % PAIR_WARPS, block.lane = lane;
        block.thread = 32 * block.warp + lane, block.place = rank * S::PAIRS + block.pair;
        // Parts of larger tiles are finished by a launch of their own: it has more threads, and so much to read hides what it costs.
        const bool fuses_reduction = S::PAIRS > 1 && args.arrivals != nullptr;
        if (fuses_reduction && block.thread == 32) block.split_tiles.find(args, blockIdx.x / S::CLUSTER);
        wait_on_dependent_grids();
        if constexpr (S::PAIRS == 1) HadamardEpilogue<S::TOKENS>(memory + BARRIER_BYTES).write_matrix(block.thread);
        PrefillScheduler scheduler(args, blockIdx.x / S::CLUSTER, gridDim.x / S::CLUSTER);
        PrefillWorkTile work;
        while (scheduler.next(args, work)) dispatch_kind<S>(List{}, block, work);
        if constexpr (S::PAIRS > 1) {
            if (fuses_reduction) reduce_splits<S>(block);
        }
    }
}

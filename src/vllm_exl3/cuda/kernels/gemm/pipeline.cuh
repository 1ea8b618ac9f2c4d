// The pipeline of k blocks in shared memory between the warp that copies and the warps that multiply.
//
// A stage holds a k block: eight k-tile rows of an n tile's trellis, each padded so that the lanes' reads are free of bank conflicts, and
// behind them the activations of 128 channels in the order of wgmma's B operand.
#pragma once
#include "base/barrier.cuh"
#include "gemm/scheduler.cuh"

constexpr u32 GEMM_K_TILES = GEMM_BLOCK_K / 16;

struct GemmPipeline {
    u32 base, stride, stages, weight_bytes;
    u32 full, empty;                // shared addresses of barriers, `stages` of each
    u32 index = 0, phase = 0, stage; // the next stage, the parity of its barrier, its address

    __device__ __forceinline__ GemmPipeline(const PrefillArgs& args, u32 barriers, u32 memory, u32 activation_bytes)
        : base(memory), stride(args.weight_bytes + activation_bytes), stages(args.stages), weight_bytes(args.weight_bytes), full(barriers),
          empty(barriers + 8 * args.stages), stage(memory) {}

    __device__ __forceinline__ void init(u32 consumers) const {
        for (u32 i = 0; i < stages; ++i) mbarrier_init(full + 8 * i, 1), mbarrier_init(empty + 8 * i, consumers);
        fence_barrier_init();
    }
    __device__ __forceinline__ void next() {
        ++index, stage += stride;
        if (index == stages) index = 0, stage = base, phase ^= 1;
    }
    __device__ __forceinline__ void wait_full() const { mbarrier_wait(full + 8 * index, phase); }
    __device__ __forceinline__ void wait_empty() const { mbarrier_wait(empty + 8 * index, phase ^ 1); }  // the first round finds empty stages
    __device__ __forceinline__ u32 empty_barrier() const { return empty + 8 * index; }
    __device__ __forceinline__ u32 activations() const { return stage + weight_bytes; }
};

// Where a work tile's k blocks lie in memory.
struct KBlockLoader {
    const u8* weights;
    const u8* activations;
    u64 pitch;             // bytes from one k-tile row to the next
    u32 bytes, row_bytes;  // of a k-tile row: what there is, and its place in the pipeline
    u32 activation_bytes;

    __device__ __forceinline__ KBlockLoader(const PrefillArgs& args, const GemmWorkTile& work, u32 activation_bytes) : activation_bytes(activation_bytes) {
        const PrefillShard& shard = args.shards[work.shard];
        const u32 block_bytes = 8 * 16 * shard.half_bits, blocks = shard.out_features / HADAMARD_SIZE;
        bytes = min(2u, blocks - 2 * work.n_tile) * block_bytes, row_bytes = 2 * block_bytes + ROW_PAD;
        pitch = static_cast<u64>(blocks) * block_bytes;
        weights = reinterpret_cast<const u8*>(shard.trellis) + GEMM_K_TILES * work.begin * pitch + 2 * work.n_tile * block_bytes;
        activations = args.activations + static_cast<u64>(work.shard * (args.in_features / GEMM_BLOCK_K) + work.begin) * activation_bytes;
    }
    __device__ __forceinline__ void fetch_weights(const GemmPipeline& pipeline) {
        const u32 barrier = pipeline.full + 8 * pipeline.index;
        if (elect_one()) {
            mbarrier_arrive_expect_tx(barrier, GEMM_K_TILES * bytes + activation_bytes);
#pragma unroll
            for (u32 row = 0; row < GEMM_K_TILES; ++row) bulk_copy(pipeline.stage + row * row_bytes, weights + row * pitch, bytes, barrier);
        }
        weights += GEMM_K_TILES * pitch;
    }
    __device__ __forceinline__ void fetch_activations(const GemmPipeline& pipeline) {
        if (elect_one()) bulk_copy(pipeline.activations(), activations, activation_bytes, pipeline.full + 8 * pipeline.index);
        activations += activation_bytes;
    }
};

// Fetches every k block of the block's range. One warp. The first one's weights, which never change, are fetched while the kernel ahead runs. More
// would not do: memory answers in the order of issue, and whole pipelines of all multiprocessors take it microseconds.
__device__ __forceinline__ void produce(const PrefillArgs& args, GemmPipeline pipeline, u32 activation_bytes) {
    bool waited = false;
    for_each_work_tile(args, [&](const GemmWorkTile& work) {
        KBlockLoader source(args, work, activation_bytes);
        for (u32 k_block = work.begin; k_block < work.end; ++k_block, pipeline.next()) {
            pipeline.wait_empty();
            source.fetch_weights(pipeline);
            if (!waited) wait_on_dependent_grids();
            waited = true;
            source.fetch_activations(pipeline);
        }
    });
}

// The ring of units in shared memory between the warp that copies and the warps that multiply.
//
// A stage holds a unit: eight k-tile rows of a strip's trellis, each padded so that the lanes' reads are free of bank conflicts, and
// behind them the activations of 128 channels in the order of wgmma's B operand.
#pragma once
#include "barrier.cuh"
#include "gemm_schedule.cuh"

constexpr u32 UNIT_ROWS = GEMM_UNIT / 16, GEMM_ROW_PAD = 32;

struct GemmRing {
    u32 base, stride, stages, weight_bytes;
    u32 full, empty;                // shared addresses of barriers, `stages` of each
    u32 slot = 0, phase = 0, stage; // the next slot, the parity of its barrier, its address

    __device__ __forceinline__ GemmRing(const PrefillArgs& args, u32 barriers, u32 memory, u32 activation_bytes)
        : base(memory), stride(args.weight_bytes + activation_bytes), stages(args.stages), weight_bytes(args.weight_bytes), full(barriers),
          empty(barriers + 8 * args.stages), stage(memory) {}

    __device__ __forceinline__ void init(u32 consumers) const {
        for (u32 i = 0; i < stages; ++i) mbarrier_init(full + 8 * i, 1), mbarrier_init(empty + 8 * i, consumers);
        mbarrier_init_visible();
    }
    __device__ __forceinline__ void next() {
        ++slot, stage += stride;
        if (slot == stages) slot = 0, stage = base, phase ^= 1;
    }
    __device__ __forceinline__ void wait_full() const { mbarrier_wait(full + 8 * slot, phase); }
    __device__ __forceinline__ void wait_empty() const { mbarrier_wait(empty + 8 * slot, phase ^ 1); }  // the first round finds empty slots
    __device__ __forceinline__ u32 release_barrier() const { return empty + 8 * slot; }
    __device__ __forceinline__ u32 activations() const { return stage + weight_bytes; }
};

// Where a segment's units lie in memory.
struct UnitSource {
    const u8* weights;
    const u8* activations;
    u64 pitch;             // bytes from one k-tile row to the next
    u32 bytes, row_bytes;  // of a k-tile row: what there is, and its place in the ring
    u32 activation_bytes;

    __device__ __forceinline__ UnitSource(const PrefillArgs& args, const GemmSegment& segment, u32 activation_bytes) : activation_bytes(activation_bytes) {
        const PrefillShard& shard = args.shards[segment.shard];
        const u32 block_bytes = 8 * 16 * shard.half_bits, blocks = shard.out_features / STRIP;
        bytes = min(2u, blocks - 2 * segment.strip) * block_bytes, row_bytes = 2 * block_bytes + GEMM_ROW_PAD;
        pitch = static_cast<u64>(blocks) * block_bytes;
        weights = reinterpret_cast<const u8*>(shard.trellis) + UNIT_ROWS * segment.begin * pitch + 2 * segment.strip * block_bytes;
        activations = args.activations + static_cast<u64>(segment.shard * (args.in_features / GEMM_UNIT) + segment.begin) * activation_bytes;
    }
    __device__ __forceinline__ void fetch_weights(const GemmRing& ring) {
        const u32 barrier = ring.full + 8 * ring.slot;
        if (one_lane()) {
            mbarrier_expect(barrier, UNIT_ROWS * bytes + activation_bytes);
#pragma unroll
            for (u32 row = 0; row < UNIT_ROWS; ++row) copy_to_shared(ring.stage + row * row_bytes, weights + row * pitch, bytes, barrier);
        }
        weights += UNIT_ROWS * pitch;
    }
    __device__ __forceinline__ void fetch_activations(const GemmRing& ring) {
        if (one_lane()) copy_to_shared(ring.activations(), activations, activation_bytes, ring.full + 8 * ring.slot);
        activations += activation_bytes;
    }
};

// Fetches every unit of the block's range. One warp. The first one's weights, which never change, are fetched while the kernel ahead runs. More
// would not do: memory answers in the order in which it is asked, and whole rings of all multiprocessors take it microseconds.
__device__ __forceinline__ void produce(const PrefillArgs& args, GemmRing ring, u32 activation_bytes) {
    bool waited = false;
    for_each_segment(args, [&](const GemmSegment& segment) {
        UnitSource source(args, segment, activation_bytes);
        for (u32 unit = segment.begin; unit < segment.end; ++unit, ring.next()) {
            ring.wait_empty();
            source.fetch_weights(ring);
            if (!waited) wait_for_previous();
            waited = true;
            source.fetch_activations(ring);
        }
    });
}

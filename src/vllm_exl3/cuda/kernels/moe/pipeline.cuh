// The pipeline of the grouped GEMM for many rows: the list of work, the pipeline of k blocks in shared memory, and the first
// warp's fetching, which runs on over the ends of work tiles.
#pragma once
#include "base/barrier.cuh"
#include "moe/rows.cuh"

constexpr u32 MOE_BARRIER_BYTES = 512;  // then the pipeline

// The list of work: which work tile a number means. BY_KIND: in the order of `schedule`.
template <bool BY_KIND>
struct WorkList {
    const MoeArgs& args;
    const MoeStage& stage;
    u32 width;      // Hadamard blocks of a work tile
    u32 steps;      // work tiles of one projection of a row block
    u32 per_block;  // work tiles of a row block
    u32 work_tiles;

    __device__ __forceinline__ WorkList(const MoeArgs& args, const MoeStage& stage, u32 hadamard_blocks)
        : args(args), stage(stage), width(hadamard_blocks) {
        steps = (stage.out_features / HADAMARD_SIZE + width - 1) / width;
        per_block = steps * stage.projections;
        work_tiles = args.list_sizes[0] * per_block;
    }
    __device__ __forceinline__ const RowBlock& rows(u32 work_tile) const { return BY_KIND ? stage.schedule[work_tile / steps] : args.blocks[work_tile / per_block]; }
    // Of the stage, by what `rows` gave for the work tile.
    __device__ __forceinline__ u32 projection(u32 work_tile, const RowBlock& rows) const { return BY_KIND ? rows.kind & 0xff : work_tile % per_block / steps; }
    __device__ __forceinline__ u32 n_block(u32 work_tile) const { return work_tile % steps * width; }
};

// A pipeline of stages. A stage holds K_BLOCKS k blocks: first the weights of all, four rows of the block's tiles each, then the activations
// of all. Registers are scarce, so it only knows where it is; the rest follows from the launch's arguments.
struct MoePipeline {
    u32 index = 0, phase = 0, address;  // the stage that is next, the parity of its barrier, its address

    static __device__ __forceinline__ u32 memory() {
        extern __shared__ __align__(128) u8 shared[];
        return shared_address(shared);
    }
    static __device__ __forceinline__ u32 base() { return memory() + MOE_BARRIER_BYTES; }
    __device__ __forceinline__ u32 full() const { return memory() + 8 * index; }
    __device__ __forceinline__ u32 empty(const MoeArgs& args) const { return memory() + 8 * (args.pipeline_stages + index); }
    __device__ __forceinline__ void next(const MoeArgs& args) {
        ++index, address += args.stage_stride;
        if (index == args.pipeline_stages) index = 0, address = base(), phase ^= 1;
    }
};

// The position of the producer.
template <int K_BLOCKS>
struct WideCursor {
    const u8 *weights, *activations;
    u32 work_tile, left;                   // stages' worth of the work tile that is not fetched yet
    u32 pitch, row_bytes;             // of k-tile rows of weights
    u32 k_block_bytes, activation_bytes; // from one k block of the expert's activations to the next, and what of it is copied
    u32 filled, phase;                // stage of the pipeline, and the parity of its empty barrier

    // The Hadamard block that is `skipped` beyond the work tile's first.
    template <class List>
    __device__ __forceinline__ void seek(const MoeArgs& args, const MoeStage& stage, const List& list, u32 skipped = 0) {
        if (work_tile >= list.work_tiles) return;
        const RowBlock rows = list.rows(work_tile);
        const u32 index = list.projection(work_tile, rows), owner = rows_owner(args, stage, rows.expert, index);
        const Projection& projection = projection_of(args, rows.expert, stage.first + index);
        const u32 blocks = stage.out_features / HADAMARD_SIZE;
        const u32 n_block = min(list.n_block(work_tile) + skipped, blocks - 1);  // beyond the last, a block of a cluster repeats it
        const u32 start = args.starts[rows.expert], end = args.starts[rows.expert + 1];
        left = stage.in_features / (K_BLOCKS * BLOCK_K);
        row_bytes = 8 * 16 * projection.half_bits, pitch = blocks * row_bytes;
        weights = reinterpret_cast<const u8*>(stage.trellis + projection.trellis) + n_block * row_bytes;
        k_block_bytes = (end - start) * BLOCK_K * 2;
        activation_bytes = (rows.rows + GROUP_ROWS - 1) / GROUP_ROWS * GROUP_BYTES;
        activations = stage.rows + (static_cast<u64>(owner) * args.padded_rows + start) * 2 * stage.in_features +
            (rows.first - start) * BLOCK_K * 2;
    }
    __device__ __forceinline__ u32 stage_bytes() const { return K_BLOCKS * (4 * row_bytes + activation_bytes); }
    __device__ __forceinline__ void copy_weights(const MoeArgs& args, u32 target, u32 barrier) const {
#pragma unroll
        for (int row = 0; row < 4 * K_BLOCKS; ++row)
            bulk_copy(target + row * args.weight_pitch, weights + static_cast<u64>(row) * pitch, row_bytes, barrier);
    }
    // Beyond the work tile's last it is false.
    __device__ __forceinline__ bool advance() {
        weights += 4 * K_BLOCKS * static_cast<u64>(pitch), activations += static_cast<u64>(K_BLOCKS) * k_block_bytes;
        return --left != 0;
    }
};

// One warp's state.
template <int K_BLOCKS_, class List>
struct MoePair {
    static constexpr int K_BLOCKS = K_BLOCKS_;
    const MoeArgs& args;
    const MoeStage& stage;
    const List& list;
    MoePipeline pipeline;
    WideCursor<K_BLOCKS> cursor;
    u32 held;        // stages that are read before the first of them is free: decoding runs one ahead
    int warp, lane;

    __device__ __forceinline__ u32 n_block(u32 work_tile) const { return list.n_block(work_tile); }
    __device__ __forceinline__ u32 activations() const { return pipeline.address + 4 * K_BLOCKS * args.weight_pitch; }
    __device__ __forceinline__ void release(u32 empty) const {
        if (lane == 0) mbarrier_arrive(empty);
    }

    // Starts the copies of the stage at the cursor and moves on. The first warp calls it.
    __device__ __forceinline__ void fetch() {
        if (cursor.work_tile < list.work_tiles) {
            if (elect_one()) {
                const u32 barrier = MoePipeline::memory() + 8 * cursor.filled, target = MoePipeline::base() + cursor.filled * args.stage_stride;
                mbarrier_arrive_expect_tx(barrier, cursor.stage_bytes());
                cursor.copy_weights(args, target, barrier);
#pragma unroll
                for (int k_block = 0; k_block < K_BLOCKS; ++k_block)
                    bulk_copy(target + 4 * K_BLOCKS * args.weight_pitch + k_block * args.activation_stride,
                                   cursor.activations + static_cast<u64>(k_block) * cursor.k_block_bytes, cursor.activation_bytes, barrier);
            }
            __syncwarp();
            if (!cursor.advance()) cursor.work_tile += gridDim.x, cursor.seek(args, stage, list);
        }
        if (++cursor.filled == args.pipeline_stages) cursor.filled = 0, cursor.phase ^= 1;
    }

    // Fills the oldest stage again, once every warp has left it, and waits for the stage that is read next.
    __device__ __forceinline__ void wait_for_stage() {
        if (held) {
            --held;
        } else if (warp == 0) {
            if (cursor.work_tile < list.work_tiles) mbarrier_wait(MoePipeline::memory() + 8 * (args.pipeline_stages + cursor.filled), cursor.phase);
            fetch();
        }
        mbarrier_wait(pipeline.full(), pipeline.phase);
    }
};

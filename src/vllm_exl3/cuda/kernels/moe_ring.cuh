// What streams through the grouped GEMM for many rows: the list of work, the ring of units in shared memory, and the first
// warp's fetching, which runs on over the ends of items.
#pragma once
#include "barrier.cuh"
#include "moe_rows.cuh"
#include "moe_strip.cuh"

constexpr int PAIR_WARPS = 8, PAIR_THREADS = 32 * PAIR_WARPS;
constexpr u32 MOE_BARRIER_BYTES = 512;  // barriers; then the pairs' staging areas, then the ring

// The list of work: which item a number means.
struct WorkList {
    u32 steps;      // items of one projection of a row block
    u32 per_block;  // items of a row block
    u32 items;

    __device__ __forceinline__ WorkList(const MoeArgs& args, const MoeStage& stage, u32 width) {
        steps = (stage.out_features / STRIP + width - 1) / width;
        per_block = steps * stage.projections;
        items = args.list_sizes[0] * per_block;
    }
    __device__ __forceinline__ u32 projection(u32 item) const { return item % per_block / steps; }
    __device__ __forceinline__ u32 strip(u32 item, u32 width) const { return item % steps * width; }
};

// A ring of units: weights as four rows of the block's tiles, then activations. Registers are scarce, so it only knows where
// it is; the rest follows from the launch's arguments.
struct MoeRing {
    u32 slot = 0, phase = 0, at;  // the slot that is next, the parity of its barrier, its address

    static __device__ __forceinline__ u32 memory() {
        extern __shared__ __align__(128) u8 shared[];
        return shared_address(shared);
    }
    static __device__ __forceinline__ u32 base(int pairs) { return memory() + MOE_BARRIER_BYTES + pairs * STAGED_BYTES; }
    __device__ __forceinline__ u32 full() const { return memory() + 8 * slot; }
    __device__ __forceinline__ u32 empty(const MoeArgs& args) const { return memory() + 8 * (args.ring_stages + slot); }
    __device__ __forceinline__ void next(const MoeArgs& args, int pairs) {
        ++slot, at += args.ring_stride;
        if (slot == args.ring_stages) slot = 0, at = base(pairs), phase ^= 1;
    }
};

// What the first warp fetches next.
struct WideCursor {
    const u8 *weights, *activations;
    u32 item, left;                   // units of the item that are not fetched yet
    u32 pitch, row_bytes;             // of k-tile rows of weights
    u32 unit_bytes, activation_bytes; // from one unit of the expert's activations to the next, and what of it is copied
    u32 filled, phase;                // slot of the ring, and the parity of its empty barrier

    __device__ __forceinline__ void seek(const MoeArgs& args, const MoeStage& stage, const WorkList& list, u32 pairs) {
        if (item >= list.items) return;
        const RowBlock rows = args.blocks[item / list.per_block];
        const u32 index = list.projection(item), strip = list.strip(item, pairs), owner = rows_owner(args, stage, rows.expert, index);
        const Projection& projection = projection_of(args, rows.expert, stage.first + index);
        const u32 strip_bytes = 8 * 16 * projection.half_bits, blocks = stage.out_features / STRIP;
        const u32 start = args.starts[rows.expert], end = args.starts[rows.expert + 1];
        left = stage.in_features / UNIT_IN;
        pitch = blocks * strip_bytes, row_bytes = min(pairs, blocks - strip) * strip_bytes;
        weights = reinterpret_cast<const u8*>(stage.trellis + projection.trellis) + strip * strip_bytes;
        unit_bytes = (end - start) * UNIT_IN * 2;
        activation_bytes = (rows.rows + GROUP_ROWS - 1) / GROUP_ROWS * GROUP_BYTES;
        activations = stage.rows + (static_cast<u64>(owner) * args.padded_rows + start) * 2 * stage.in_features +
            (rows.first - start) * UNIT_IN * 2;
    }
};

// One warp's state; `warp` counts in the block, eight are a pair.
template <int PAIRS_>
struct MoePair {
    static constexpr int PAIRS = PAIRS_;
    const MoeArgs& args;
    const MoeStage& stage;
    const WorkList& list;
    MoeRing ring;
    WideCursor cursor;
    u32 held;        // slots that are read before the first of them is free: decoding runs one ahead
    int warp, lane;

    __device__ __forceinline__ int pair() const { return warp / PAIR_WARPS; }
    __device__ __forceinline__ void sync() const { sync_threads(1 + pair(), PAIR_THREADS); }
    __device__ __forceinline__ u32 staging() const { return MoeRing::memory() + MOE_BARRIER_BYTES + pair() * STAGED_BYTES; }

    // Starts the copies of the unit at the cursor and moves on. The first warp calls it.
    __device__ __forceinline__ void fetch() {
        if (cursor.item < list.items) {
            if (one_lane()) {
                const u32 barrier = MoeRing::memory() + 8 * cursor.filled, target = MoeRing::base(PAIRS) + cursor.filled * args.ring_stride;
                mbarrier_expect(barrier, 4 * cursor.row_bytes + cursor.activation_bytes);
#pragma unroll
                for (int row = 0; row < 4; ++row)
                    copy_to_shared(target + row * args.weight_pitch, cursor.weights + static_cast<u64>(row) * cursor.pitch, cursor.row_bytes, barrier);
                copy_to_shared(target + 4 * args.weight_pitch, cursor.activations, cursor.activation_bytes, barrier);
            }
            __syncwarp();
            cursor.weights += 4 * static_cast<u64>(cursor.pitch), cursor.activations += cursor.unit_bytes;
            if (--cursor.left == 0) cursor.item += gridDim.x, cursor.seek(args, stage, list, PAIRS);
        }
        if (++cursor.filled == args.ring_stages) cursor.filled = 0, cursor.phase ^= 1;
    }

    // Fills the oldest slot again, once every warp has left it, and waits for the slot that is read next.
    __device__ __forceinline__ void wait_for_unit() {
        if (held) {
            --held;
        } else if (warp == 0) {
            if (cursor.item < list.items) mbarrier_wait(MoeRing::memory() + 8 * (args.ring_stages + cursor.filled), cursor.phase);
            fetch();
        }
        mbarrier_wait(ring.full(), ring.phase);
    }
};

// What streams through the grouped GEMM for many rows: the list of work, the ring of units in shared memory, and the first
// warp's fetching, which runs on over the ends of items.
#pragma once
#include "barrier.cuh"
#include "moe_rows.cuh"

constexpr int PAIR_WARPS = 8, PAIR_THREADS = 32 * PAIR_WARPS;
constexpr u32 MOE_BARRIER_BYTES = 512;  // then the ring

// The list of work: which item a number means. SORTED: in the order of `turns`.
template <bool SORTED>
struct WorkList {
    const MoeArgs& args;
    const MoeStage& stage;
    u32 width;      // Hadamard blocks of an item
    u32 steps;      // items of one projection of a row block
    u32 per_block;  // items of a row block
    u32 items;

    __device__ __forceinline__ WorkList(const MoeArgs& args, const MoeStage& stage, u32 hadamard_blocks)
        : args(args), stage(stage), width(hadamard_blocks) {
        steps = (stage.out_features / STRIP + width - 1) / width;
        per_block = steps * stage.projections;
        items = args.list_sizes[0] * per_block;
    }
    __device__ __forceinline__ const RowBlock& rows(u32 item) const { return SORTED ? stage.turns[item / steps] : args.blocks[item / per_block]; }
    // Of the stage, by what `rows` gave for the item.
    __device__ __forceinline__ u32 projection(u32 item, const RowBlock& rows) const { return SORTED ? rows.kind & 0xff : item % per_block / steps; }
    __device__ __forceinline__ u32 strip(u32 item) const { return item % steps * width; }
};

// A ring of slots. A slot holds UNITS units: first the weights of all, four rows of the block's tiles each, then the activations
// of all. Registers are scarce, so it only knows where it is; the rest follows from the launch's arguments.
struct MoeRing {
    u32 slot = 0, phase = 0, at;  // the slot that is next, the parity of its barrier, its address

    static __device__ __forceinline__ u32 memory() {
        extern __shared__ __align__(128) u8 shared[];
        return shared_address(shared);
    }
    static __device__ __forceinline__ u32 base() { return memory() + MOE_BARRIER_BYTES; }
    __device__ __forceinline__ u32 full() const { return memory() + 8 * slot; }
    __device__ __forceinline__ u32 empty(const MoeArgs& args) const { return memory() + 8 * (args.ring_stages + slot); }
    __device__ __forceinline__ void next(const MoeArgs& args) {
        ++slot, at += args.ring_stride;
        if (slot == args.ring_stages) slot = 0, at = base(), phase ^= 1;
    }
};

// What is fetched next.
template <int UNITS>
struct WideCursor {
    const u8 *weights, *activations;
    u32 item, left;                   // slots' worth of the item that is not fetched yet
    u32 pitch, row_bytes;             // of k-tile rows of weights
    u32 unit_bytes, activation_bytes; // from one unit of the expert's activations to the next, and what of it is copied
    u32 filled, phase;                // slot of the ring, and the parity of its empty barrier

    // The Hadamard block that is `skipped` beyond the item's first.
    template <class List>
    __device__ __forceinline__ void seek(const MoeArgs& args, const MoeStage& stage, const List& list, u32 skipped = 0) {
        if (item >= list.items) return;
        const RowBlock rows = list.rows(item);
        const u32 index = list.projection(item, rows), owner = rows_owner(args, stage, rows.expert, index);
        const Projection& projection = projection_of(args, rows.expert, stage.first + index);
        const u32 blocks = stage.out_features / STRIP;
        const u32 strip = min(list.strip(item) + skipped, blocks - 1);  // beyond the last, a block of a cluster repeats it
        const u32 start = args.starts[rows.expert], end = args.starts[rows.expert + 1];
        left = stage.in_features / (UNITS * UNIT_IN);
        row_bytes = 8 * 16 * projection.half_bits, pitch = blocks * row_bytes;
        weights = reinterpret_cast<const u8*>(stage.trellis + projection.trellis) + strip * row_bytes;
        unit_bytes = (end - start) * UNIT_IN * 2;
        activation_bytes = (rows.rows + GROUP_ROWS - 1) / GROUP_ROWS * GROUP_BYTES;
        activations = stage.rows + (static_cast<u64>(owner) * args.padded_rows + start) * 2 * stage.in_features +
            (rows.first - start) * UNIT_IN * 2;
    }
    __device__ __forceinline__ u32 slot_bytes() const { return UNITS * (4 * row_bytes + activation_bytes); }
    __device__ __forceinline__ void copy_weights(const MoeArgs& args, u32 target, u32 barrier) const {
#pragma unroll
        for (int row = 0; row < 4 * UNITS; ++row)
            copy_to_shared(target + row * args.weight_pitch, weights + static_cast<u64>(row) * pitch, row_bytes, barrier);
    }
    // Beyond the item's last it is false.
    __device__ __forceinline__ bool advance() {
        weights += 4 * UNITS * static_cast<u64>(pitch), activations += static_cast<u64>(UNITS) * unit_bytes;
        return --left != 0;
    }
};

// One warp's state.
template <int UNITS_, class List>
struct MoePair {
    static constexpr int UNITS = UNITS_;
    const MoeArgs& args;
    const MoeStage& stage;
    const List& list;
    MoeRing ring;
    WideCursor<UNITS> cursor;
    u32 held;        // slots that are read before the first of them is free: decoding runs one ahead
    int warp, lane;

    __device__ __forceinline__ u32 strip(u32 item) const { return list.strip(item); }
    __device__ __forceinline__ u32 activations() const { return ring.at + 4 * UNITS * args.weight_pitch; }
    __device__ __forceinline__ void release(u32 empty) const {
        if (lane == 0) mbarrier_arrive(empty);
    }

    // Starts the copies of the slot at the cursor and moves on. The first warp calls it.
    __device__ __forceinline__ void fetch() {
        if (cursor.item < list.items) {
            if (one_lane()) {
                const u32 barrier = MoeRing::memory() + 8 * cursor.filled, target = MoeRing::base() + cursor.filled * args.ring_stride;
                mbarrier_expect(barrier, cursor.slot_bytes());
                cursor.copy_weights(args, target, barrier);
#pragma unroll
                for (int unit = 0; unit < UNITS; ++unit)
                    copy_to_shared(target + 4 * UNITS * args.weight_pitch + unit * args.activation_stride,
                                   cursor.activations + static_cast<u64>(unit) * cursor.unit_bytes, cursor.activation_bytes, barrier);
            }
            __syncwarp();
            if (!cursor.advance()) cursor.item += gridDim.x, cursor.seek(args, stage, list);
        }
        if (++cursor.filled == args.ring_stages) cursor.filled = 0, cursor.phase ^= 1;
    }

    // Fills the oldest slot again, once every warp has left it, and waits for the slot that is read next.
    __device__ __forceinline__ void wait_for_slot() {
        if (held) {
            --held;
        } else if (warp == 0) {
            if (cursor.item < list.items) mbarrier_wait(MoeRing::memory() + 8 * (args.ring_stages + cursor.filled), cursor.phase);
            fetch();
        }
        mbarrier_wait(ring.full(), ring.phase);
    }
};

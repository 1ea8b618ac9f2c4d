// One warp's ring of units in shared memory: weights and activations stream in behind the arithmetic.
//
// Each warp fetches for itself, so nothing in the main loop waits for another warp. A unit's weights come in two halves
// (4 output tiles each), each refilled as soon as it is consumed; the activations travel with the first half.
// sm_90 and later: bulk copies that complete on an mbarrier, issued by one lane. Before: cp.async by all lanes.
#pragma once
#include "problem.cuh"

constexpr int HALVES = 2;
constexpr int HALF_TILES = 4;
constexpr int ROW_PAD = 32;  // bytes after each k-tile's row: makes the lanes' reads free of bank conflicts

// The unit that is fetched next, and where its bytes lie. Moving on inside a strip is two additions.
struct Cursor {
    const u8* weights;      // first k-tile row of the unit
    const u8* activations;
    u32 unit, end;          // this warp's position in the block's range
    u32 k, depth;           // position inside the strip, in units
    u32 pitch;              // bytes from one k-tile row to the next
    u32 row_bytes;          // of one k-tile row of half a strip of 128 channels
    u32 strip_bytes;        // of one k-tile row of the whole strip
    u32 activation_bytes;   // of a unit

    __device__ __forceinline__ bool valid() const { return unit < end; }
    __device__ __forceinline__ void seek(const LinearArgs& args) {
        u32 index = 0;
        while (index + 1 < args.shard_count && unit >= args.shards[index + 1].first_unit) ++index;
        const ShardArgs& shard = args.shards[index];
        const u32 local = unit - shard.first_unit, tile_bytes = 16 * shard.half_bits;
        depth = shard.in_features / UNIT_IN;
        const u32 strip = local / depth;
        k = local % depth;
        pitch = shard.out_features / 16 * tile_bytes;
        row_bytes = HALF_TILES * tile_bytes;
        activation_bytes = args.activation_stride ? unit_activation_bytes(shard.arithmetic, args.stored_rows) : 0;
        weights = reinterpret_cast<const u8*>(shard.trellis) + static_cast<u64>(4 * k) * pitch + strip * (args.strip_tiles * tile_bytes);
        strip_bytes = min(args.strip_tiles, shard.out_features / 16 - strip * args.strip_tiles) * tile_bytes;
        activations = args.activations + static_cast<u64>(shard.activation_block) * 16 +
            static_cast<u64>(blockIdx.y * depth + k) * activation_bytes;
    }
    __device__ __forceinline__ void advance(const LinearArgs& args, u32 step) {
        unit += step, k += step;
        if (k < depth) {
            weights += static_cast<u64>(4 * step) * pitch;
            activations += step * activation_bytes;
        } else if (valid()) {
            seek(args);
        }
    }
};

struct Ring {
    u32 base, barriers;  // shared addresses of this warp's slots and of its ring_units × HALVES barriers
    u32 unit_stride, half_stride, units;
    u32 consumed, consumed_phase, filled;  // slot being read, its barrier's parity, slot to fill

    __device__ __forceinline__ void init(u32 base_address, u32 barrier_address, const LinearArgs& args, int lane) {
        base = base_address, barriers = barrier_address;
        half_stride = args.half_stride, units = args.ring_units;
        unit_stride = HALVES * half_stride + args.activation_stride;
        consumed = 0, consumed_phase = 0, filled = 0;
#if __CUDA_ARCH__ >= 900
        if (lane == 0) {
            for (u32 i = 0; i < units * HALVES; ++i)
                asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
#endif
    }

    __device__ __forceinline__ u32 weights(u32 slot, u32 half) const { return base + slot * unit_stride + half * half_stride; }
    __device__ __forceinline__ u32 activations(u32 slot) const { return base + slot * unit_stride + HALVES * half_stride; }

    // Starts the copies of one half of the unit at the cursor. Before wait_for_previous only weights may be asked for;
    // their activations then follow in a second call. HALF_BITS is that of all shards, or 0 where they differ.
    template <bool WEIGHTS, bool ACTIVATIONS, int HALF_BITS>
    __device__ __forceinline__ void fetch(const Cursor& at, u32 half, int lane) {
        const u32 row_bytes = HALF_BITS ? HALF_TILES * 16 * HALF_BITS : at.row_bytes;
        const u8* source = at.weights + half * row_bytes;
        const u32 activation_bytes = half == 0 ? at.activation_bytes : 0;
        const u32 target = weights(filled, half);
#if __CUDA_ARCH__ >= 900
        if (elect_lane()) {
            const u32 barrier = barriers + 8 * (filled * HALVES + half);
            if (WEIGHTS) {
                asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                             ::"r"(barrier), "r"(4 * row_bytes + activation_bytes) : "memory");
#pragma unroll
                for (int row = 0; row < 4; ++row)
                    bulk_copy(target + row * (row_bytes + ROW_PAD), source + static_cast<u64>(row) * at.pitch, row_bytes, barrier);
            }
            if (ACTIVATIONS && half == 0 && activation_bytes) bulk_copy(activations(filled), at.activations, activation_bytes, barrier);
        }
#else
        if (WEIGHTS) {
#pragma unroll
            for (int row = 0; row < 4; ++row)
                for (u32 byte = 16 * lane; byte < row_bytes; byte += 512)
                    async_copy(target + row * (row_bytes + ROW_PAD) + byte, source + static_cast<u64>(row) * at.pitch + byte);
        }
        if (ACTIVATIONS && half == 0)
            for (u32 byte = 16 * lane; byte < activation_bytes; byte += 512)
                async_copy(activations(filled) + byte, at.activations + byte);
#endif
    }

    // Closes what `fetch` started for one half; called for every half, also where nothing is left to fetch.
    __device__ __forceinline__ void commit() {
#if __CUDA_ARCH__ < 900
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }

    // Waits until a half of the slot being read has arrived.
    __device__ __forceinline__ void wait(u32 half) {
#if __CUDA_ARCH__ >= 900
        const u32 barrier = barriers + 8 * (consumed * HALVES + half);
        asm volatile(
            "{\n"
            ".reg .pred arrived;\n"
            "again:\n"
            "mbarrier.try_wait.parity.shared.b64 arrived, [%0], %1;\n"
            "@!arrived bra again;\n"
            "}\n" ::"r"(barrier), "r"(consumed_phase) : "memory");
#else
        if (units == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
        else asm volatile("cp.async.wait_group 3;" ::: "memory");
        __syncwarp();
#endif
    }

    __device__ __forceinline__ void next_filled() { filled = filled + 1 == units ? 0 : filled + 1; }
    __device__ __forceinline__ void next_consumed() {
        if (++consumed == units) consumed = 0, consumed_phase ^= 1;
    }

    // One lane of the warp, in the form that lets the compiler issue bulk copies without looping over lanes.
    static __device__ __forceinline__ bool elect_lane() {
        u32 elected;
        asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}\n" : "=r"(elected));
        return elected != 0;
    }
    static __device__ __forceinline__ void bulk_copy(u32 target, const u8* source, u32 bytes, u32 barrier) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(target), "l"(source), "r"(bytes), "r"(barrier) : "memory");
    }
    static __device__ __forceinline__ void async_copy(u32 target, const u8* source) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
    }
};

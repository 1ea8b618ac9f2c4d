// The grouped trellis GEMM for many rows on Hopper: weights are decoded to fp16 in registers, as the A operand of wgmma,
// once for up to 128 rows of an expert, or 256 where one pair of warpgroups has a multiprocessor's registers.
//
// An item is one row block × PAIRS Hadamard blocks of one projection, over all of k: nothing is shared between blocks. Units
// of 64 k stream through one ring in shared memory, on over the ends of items; the first warp fills it. Warpgroups multiply
// in pairs, a pair one Hadamard block, with one product in flight while the weights of the next are decoded (prefill.cuh says
// why one). A row's sums have the same order whatever its row block holds besides.
#pragma once
#include "barrier.cuh"
#include "fragments.cuh"
#include "moe_rows.cuh"
#include "moe_strip.cuh"
#include "wgmma.cuh"

constexpr int PAIR_WARPS = 8, PAIR_THREADS = 32 * PAIR_WARPS;
constexpr u32 MOE_BARRIER_BYTES = 512;  // barriers; then the pairs' staging areas, then the ring

constexpr float MUL1_FACTOR = 1774.0f / 262144.0f;            // k_inv, fp16 0x1EEE
constexpr float MUL1_RATIO = -10.3828125f / MUL1_FACTOR;      // k_bias / k_inv, k_bias fp16 0xC931

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

// Starts a product and waits for the one before it. A is complete before it and `words` are read after it.
template <int ROWS, int WORDS>
__device__ __forceinline__ void multiply_product(float (&sums)[ROWS / 2], u32 (&a)[4], u64 b, u32 (&words)[WORDS]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
    warpgroup_fence();
    WarpgroupMma<ROWS>::run(sums, a, b);
    warpgroup_commit();
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
#pragma unroll
    for (int i = 0; i < WORDS; ++i) asm volatile("" : "+r"(words[i]));
}

// Matrices of one group of eight rows lie 128 bytes apart, groups 1024; without a swizzle.
template <class Pair>
__device__ __forceinline__ u64 activations_descriptor(const Pair& pair) {
    return u64(GROUP_BYTES >> 4) << 32 | ((pair.ring.at + 4 * pair.args.weight_pitch) >> 4 | u32(128 >> 4) << 16);
}

template <class K, class Pair>
__device__ __forceinline__ void load_unit_words(u32 (&words)[K::Window::words], const Pair& pair) {
    const u32 row = pair.ring.at + (pair.lane & 3) * pair.args.weight_pitch;
    load_words<K::half_bits>(words, SharedWords{row + pair.warp * 4 * K::Window::tile_words}, pair.lane);
}

// The A operand of product I. mul1 weights go as byte sums, w = k_inv·(1024 + B) + k_bias without the format's rounding to
// fp16: the constant is added at the end, and two instructions of nine are saved.
template <class K, int I>
__device__ __forceinline__ void decode_wide(u32 (&a)[4], const u32 (&words)[K::Window::words]) {
    using W = typename K::Window;
    if constexpr (K::codebook == MUL1) {
        a[0] = decode_byte_sums(W::template get<8 * I>(words), W::template get<8 * I + 1>(words));
        a[1] = decode_byte_sums(W::template get<8 * I + 4>(words), W::template get<8 * I + 5>(words));
        a[2] = decode_byte_sums(W::template get<8 * I + 2>(words), W::template get<8 * I + 3>(words));
        a[3] = decode_byte_sums(W::template get<8 * I + 6>(words), W::template get<8 * I + 7>(words));
    } else {
        decode_step<K, I>(a, words);
    }
}

template <class K, int ROWS, class Pair>
__device__ __forceinline__ void multiply_rows(float (&sums)[ROWS / 2], Pair& pair) {
    u32 even[4], odd[4], words[K::Window::words];
    MoeRing& ring = pair.ring;
    pair.wait_for_unit();
    load_unit_words<K>(words, pair);
    decode_wide<K, 0>(even, words);
    u32 before = 0;  // the empty barrier of the unit before, whose last product is still in flight
    for (u32 left = pair.stage.in_features / UNIT_IN; left != 0; --left) {
        const u64 b = activations_descriptor(pair);
        multiply_product<ROWS>(sums, even, b, words);
        if (before && pair.lane == 0) mbarrier_arrive(before);
        decode_wide<K, 1>(odd, words);
        multiply_product<ROWS>(sums, odd, b + 16, words);
        decode_wide<K, 2>(even, words);
        multiply_product<ROWS>(sums, even, b + 32, words);
        decode_wide<K, 3>(odd, words);
        before = ring.empty(pair.args);
        ring.next(pair.args, Pair::PAIRS);
        // Behind the last unit this reads a slot that holds nothing of interest, and nobody uses it.
        if (left > 1) pair.wait_for_unit();
        load_unit_words<K>(words, pair);
        multiply_product<ROWS>(sums, odd, b + 48, words);
        decode_wide<K, 0>(even, words);
    }
    warpgroup_wait();
    if (pair.lane == 0) mbarrier_arrive(before);
}

// One lane's sixteen channels of a row: rounded to fp16 below 2^15, the 128 channels' scale apart.
__device__ __forceinline__ void store_rounded(const MoeStage& stage, const float (&v)[4][4], u64 at, int lane, bool exists) {
    u32 bits = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) bits = max(bits, magnitude_bits(v[j]));
#pragma unroll
    for (int step = 1; step < 8; step *= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, step));
    if (!exists) return;
    // 2^e at the largest magnitude becomes 2^14; a NaN or an infinity stays what it is.
    const u32 exponent = min(max(bits >> 23, 15u), 254u);
    const float factor = __uint_as_float((268u - exponent) << 23);
    u16* out = static_cast<u16*>(stage.out) + at * STRIP + 4 * (lane & 7);
#pragma unroll
    for (int j = 0; j < 4; ++j)
        *reinterpret_cast<uint2*>(out + 32 * j) =
            make_uint2(half_pair(v[j][0] * factor, v[j][1] * factor), half_pair(v[j][2] * factor, v[j][3] * factor));
    if ((lane & 7) == 0) stage.out_scales[at] = __uint_as_float((exponent - 14u) << 23);
}

// Output Hadamard, scales and bias of a pair's Hadamard block; eight lanes take a row.
template <int ROWS, class Pair>
__device__ __forceinline__ void finish_rows(float (&sums)[ROWS / 2], const Pair& pair, const RowBlock& rows, u32 index, u32 strip) {
    const MoeStage& stage = pair.stage;
    const Projection& projection = projection_of(pair.args, rows.expert, stage.first + index);
    const u32 owner = rows_owner(pair.args, stage, rows.expert, index);
    const int lane = pair.lane;
    const u32 first_channel = strip * STRIP + 4 * (lane & 7);
    hadamard_own(sums);
    const u32 staged = pair.staging() + 4 * (2 * (lane & 3) * STAGED_PITCH + 16 * (pair.warp % PAIR_WARPS) + (lane >> 2));
#pragma unroll 1
    for (u32 chunk = 0; chunk * STAGED_ROWS < rows.rows; ++chunk) {
        pair.sync();
        if (chunk == 0) stage_rows<0>(sums, staged);  // registers have no run-time index
        if constexpr (ROWS > 32)
            if (chunk == 1) stage_rows<32>(sums, staged);
        if constexpr (ROWS > 64) {
            if (chunk == 2) stage_rows<64>(sums, staged);
            if (chunk == 3) stage_rows<96>(sums, staged);
        }
        if constexpr (ROWS > 128) {
            if (chunk == 4) stage_rows<128>(sums, staged);
            if (chunk == 5) stage_rows<160>(sums, staged);
            if (chunk == 6) stage_rows<192>(sums, staged);
            if (chunk == 7) stage_rows<224>(sums, staged);
        }
        pair.sync();
        const u32 token = 4 * (pair.warp % PAIR_WARPS) + (lane >> 3), row = chunk * STAGED_ROWS + token;
        const bool exists = row < rows.rows;
        const u32 slot = exists ? pair.args.order[rows.first + row] : 0;
        const u32 at = slot * stage.projections + owner;
        float scale = exists ? stage.undo[at] * HADAMARD_SCALE : 0.0f, constant = 0.0f;
        if (projection.codebook == MUL1) {
            // After the step of channel bit 3 (lane bit 1) the constant is twice itself in one half and nothing in the other.
            constant = exists && !(lane & 2) ? 2.0f * MUL1_RATIO * reinterpret_cast<const float*>(stage.sums)[at] : 0.0f;
            scale *= MUL1_FACTOR;
        }
        float v[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) load_shared(v[j], pair.staging() + 4 * (token * STAGED_PITCH + 4 * (lane & 7) + 32 * j));
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) v[j][i] += constant;
        hadamard_others(v, lane);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 channel = first_channel + 32 * j;
            const uint2 raw = *reinterpret_cast<const uint2*>(stage.svh + projection.svh + channel);
            const u16 svh[4] = {u16(raw.x), u16(raw.x >> 16), u16(raw.y), u16(raw.y >> 16)};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                v[j][i] = v[j][i] * scale * half_to_float(svh[i]);
                if (stage.bias != nullptr && channel + i < stage.out_width) v[j][i] += stage.bias[projection.bias + channel + i];
            }
        }
        store_rounded(stage, v, (static_cast<u64>(slot) * stage.projections + index) * (stage.out_features / STRIP) + strip, lane, exists);
    }
}

// The same where kinds mix and two pairs share the registers, which do not suffice for a loop of each kind (ptxas would put
// waits between the products): which kind the item is of is asked for every unit, and the products of a unit follow each other.
template <class List, int ROWS, class Pair>
__device__ __forceinline__ void multiply_mixed(float (&sums)[ROWS / 2], Pair& pair, u32 kind) {
    u32 even[4][4], odd[4][4];
    MoeRing& ring = pair.ring;
    u32 left = pair.stage.in_features / UNIT_IN;
    const auto multiply = [&](u32 (&current)[4][4], u32 (&next)[4][4]) {
        const u64 b = activations_descriptor(pair);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            asm volatile("" : "+r"(current[i][0]), "+r"(current[i][1]), "+r"(current[i][2]), "+r"(current[i][3])::"memory");
        warpgroup_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) WarpgroupMma<ROWS>::run(sums, current[i], b + 16 * i);
        warpgroup_commit();
        const u32 empty = ring.empty(pair.args);
        ring.next(pair.args, Pair::PAIRS);
        const bool more = --left > 0;
        if (more) {
            pair.wait_for_unit();
            List::decode(kind, next, pair);
        }
        warpgroup_wait();
        if (pair.lane == 0) mbarrier_arrive(empty);
        return more;
    };
    pair.wait_for_unit();
    List::decode(kind, even, pair);
    while (multiply(even, odd) && multiply(odd, even)) {}
}

template <class K, class Pair>
__device__ __forceinline__ void decode_unit(u32 (&a)[4][4], const Pair& pair) {
    u32 words[K::Window::words];
    load_unit_words<K>(words, pair);
    decode_wide<K, 0>(a[0], words);
    decode_wide<K, 1>(a[1], words);
    decode_wide<K, 2>(a[2], words);
    decode_wide<K, 3>(a[3], words);
}

template <class First, class... Rest> struct WideKinds {
    static constexpr bool mixed = sizeof...(Rest) != 0;
    using Only = First;

    static __device__ __forceinline__ u32 index(const Projection& projection) {
        const u32 half_bits = projection.half_bits, codebook = projection.codebook;
        u32 index = 0, found = 0;
        ((half_bits == Rest::half_bits && codebook == Rest::codebook ? void(found = ++index) : void(++index)), ...);
        return found;
    }
    template <int ROWS, class Pair>
    static __device__ __forceinline__ void multiply(float (&sums)[ROWS / 2], Pair& pair, u32 kind) {
        u32 index = 0;
        if (kind == 0) multiply_rows<First, ROWS>(sums, pair);
        ((++index == kind ? multiply_rows<Rest, ROWS>(sums, pair) : void()), ...);
    }
    template <class Pair>
    static __device__ __forceinline__ void decode(u32 kind, u32 (&a)[4][4], const Pair& pair) {
        u32 index = 0;
        if (kind == 0) decode_unit<First>(a, pair);
        ((++index == kind ? decode_unit<Rest>(a, pair) : void()), ...);
    }
};

template <class List, int ROWS, class Pair>
__device__ __forceinline__ void run_rows(Pair& pair, u32 item) {
    float sums[ROWS / 2] = {};
    if constexpr (List::mixed) {
        const u32 expert = pair.args.blocks[item / pair.list.per_block].expert;
        const u32 kind = List::index(projection_of(pair.args, expert, pair.stage.first + pair.list.projection(item)));
        if constexpr (Pair::PAIRS == 1) List::template multiply<ROWS>(sums, pair, kind);
        else multiply_mixed<List, ROWS>(sums, pair, kind);
    } else {
        multiply_rows<typename List::Only, ROWS>(sums, pair);
    }
    // Where the projection's last item is not full, the second pair has decoded what it does not need.
    const u32 strip = pair.list.strip(item, Pair::PAIRS) + pair.pair();
    if (strip < pair.stage.out_features / STRIP)
        finish_rows<ROWS>(sums, pair, pair.args.blocks[item / pair.list.per_block], pair.list.projection(item), strip);
}

template <class List, class Pair>
__device__ __forceinline__ void run_item(Pair& pair, u32 item) {
    const u32 rows = pair.args.blocks[item / pair.list.per_block].rows;
    if constexpr (Pair::PAIRS == 1) {
        if (rows > 128) run_rows<List, 256>(pair, item);
        else run_rows<List, 128>(pair, item);
    } else {
        if (rows > 64) run_rows<List, 128>(pair, item);
        else if (rows > 32) run_rows<List, 64>(pair, item);
        else run_rows<List, 32>(pair, item);
    }
}

template <int PAIRS, class List>
__device__ __forceinline__ void moe_wide(const MoeArgs& args) {
    const MoeStage& stage = args.stages[args.stage];
    if (threadIdx.x == 0) {
        const u32 barriers = MoeRing::memory();
        for (u32 i = 0; i < args.ring_stages; ++i)
            mbarrier_init(barriers + 8 * i, 1), mbarrier_init(barriers + 8 * (args.ring_stages + i), PAIR_WARPS * PAIRS);
        mbarrier_init_visible();
    }
    __syncthreads();
    wait_for_previous();
    let_next_start();
    const WorkList list(args, stage, PAIRS);
    MoePair<PAIRS> pair{args, stage, list};
    pair.warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), pair.lane = threadIdx.x & 31, pair.held = 2;
    pair.ring.at = MoeRing::base(PAIRS);
    pair.cursor.item = blockIdx.x, pair.cursor.filled = 0, pair.cursor.phase = 0;
    if (pair.warp == 0) {
        pair.cursor.seek(args, stage, list, PAIRS);
        for (u32 i = 0; i < args.ring_stages; ++i) pair.fetch();
        pair.cursor.phase = 0;  // the first refill waits for the first use
    }
    for (u32 item = blockIdx.x; item < list.items; item += gridDim.x) run_item<List>(pair, item);
}

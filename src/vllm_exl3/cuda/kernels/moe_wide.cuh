// The grouped trellis GEMM for many rows on Hopper: weights are decoded to fp16 in registers, as the A operand of wgmma,
// once for up to 128 rows of an expert, or 256 where one pair of warpgroups has a multiprocessor's registers.
//
// An item is one row block × PAIRS Hadamard blocks of one projection, over all of k: nothing is shared between blocks. Units
// of 64 k stream through one ring in shared memory, on over the ends of items; the first warp fills it. Warpgroups multiply
// in pairs, a pair one Hadamard block, with one product in flight while the weights of the next are decoded (prefill.cuh says
// why one). A row's sums have the same order whatever its row block holds besides.
#pragma once
#include "fragments.cuh"
#include "moe_finish.cuh"
#include "wgmma.cuh"

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

// The trellis GEMM for 17 tokens and more on Hopper: weights are decoded to fp16 in registers, as the A operand of wgmma,
// once for up to 128 tokens.
//
// One block per multiprocessor, four warpgroups. Its strip is two Hadamard blocks of output channels, one a pair of
// warpgroups; each warpgroup holds 64 channels, one tile column a warp. All multiply the same activations. Units stream
// through one ring in shared memory; while one warpgroup decodes, the others' products run, and its own next ones.
#pragma once
#include "fragments.cuh"
#include "store.cuh"
#include "wgmma.cuh"

constexpr int WIDE_THREADS = 512;
constexpr int WIDE_WARPS = WIDE_THREADS / 32;
constexpr int PAIR_THREADS = WIDE_THREADS / 2;
constexpr int PAIR_WARPS = PAIR_THREADS / 32;
constexpr int CHUNK = 32;  // tokens whose outputs are in shared memory at once
constexpr u32 OUTPUT_PITCH = STRIP + 4;
constexpr u32 STAGING_BYTES = 2 * CHUNK * OUTPUT_PITCH * 4;

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 phase) {
    asm volatile(
        "{\n"
        ".reg .pred arrived;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 arrived, [%0], %1;\n"
        "@!arrived bra again;\n"
        "}\n" ::"r"(barrier), "r"(phase) : "memory");
}

// The block's ring of units.
struct WideRing {
    u32 base, stride, weight_bytes, stages;
    u32 full, empty;        // barriers, `stages` each
    u32 slot, phase, stage; // being read: its number, its barriers' parity, its address

    __device__ __forceinline__ void next() {
        ++slot, stage += stride;
        if (slot == stages) slot = 0, stage = base, phase ^= 1;
    }
};

// What the first warp keeps besides: which unit goes to which slot next.
struct WideProducer {
    Cursor cursor;
    u32 filled, phase;  // slot, and the parity of its empty barrier

    __device__ __forceinline__ void next(const LinearArgs& args, const WideRing& ring) {
        if (++filled == ring.stages) filled = 0, phase ^= 1;
        cursor.advance(args, 1);
    }
    template <bool WEIGHTS, bool ACTIVATIONS>
    __device__ __forceinline__ void fetch(const WideRing& ring) const {
        const u32 barrier = ring.full + 8 * filled, target = ring.base + filled * ring.stride;
        const u32 pitch = 4 * cursor.row_bytes + ROW_PAD;
        if (!Ring::elect_lane()) return;
        if (WEIGHTS) {
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                         ::"r"(barrier), "r"(4 * cursor.strip_bytes + cursor.activation_bytes) : "memory");
#pragma unroll
            for (int row = 0; row < 4; ++row)
                Ring::bulk_copy(target + row * pitch, cursor.weights + static_cast<u64>(row) * cursor.pitch, cursor.strip_bytes, barrier);
        }
        if (ACTIVATIONS) Ring::bulk_copy(target + ring.weight_bytes, cursor.activations, cursor.activation_bytes, barrier);
    }
};

// The part of a strip that one block computed.
struct WideSegment {
    u32 shard, strip, strip_begin, strip_end;
    bool complete;
};

// Fewer tokens leave registers for a second A operand: the next unit is decoded while this one's products run.
template <int TOKENS> constexpr int wide_buffers() { return 2; }

struct WideBlock {
    const LinearArgs& args;
    float* staging;  // shared: outputs of CHUNK tokens a pair
    u32* last;       // shared
    WideRing ring;
    WideProducer producer;
    u32 unit;        // unit that is multiplied next
    u32 held;        // slots that are read before the first of them is free: 2 where decoding runs ahead
    int warp, lane;

    __device__ __forceinline__ int pair() const { return warp / PAIR_WARPS; }

    // Fills the oldest slot again, once every warp has left it, and waits for the slot that is read next.
    __device__ __forceinline__ void wait_for_unit() {
        if (held) {
            --held;
        } else if (warp == 0) {
            if (producer.cursor.valid()) {
                barrier_wait(ring.empty + 8 * producer.filled, producer.phase);
                producer.template fetch<true, true>(ring);
            }
            producer.next(args, ring);
        }
        barrier_wait(ring.full + 8 * ring.slot, ring.phase);
    }
};

// Adds the blocks' sums up and stores the strip if nothing is missing any more.
template <int TOKENS>
__device__ __forceinline__ void finish_wide(float (&sums)[TOKENS / 2], WideBlock& block, const WideSegment& segment) {
    const LinearArgs& args = block.args;
    const ShardArgs& shard = args.shards[segment.shard];
    if (!segment.complete) {
        const u32 first = block_of_unit(args, segment.strip_begin), last = block_of_unit(args, segment.strip_end - 1);
        const auto partials = [&](u32 from) {  // a block shares at most the strips at its two ends
            const u32 second = range_begin(args, from) < segment.strip_begin ? 1 : 0;
            return reinterpret_cast<float4*>(args.partials) + threadIdx.x +
                static_cast<u64>(2 * (blockIdx.y * gridDim.x + from) + second) * args.partial_stride;
        };
        float4* mine = partials(blockIdx.x);
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j)
            __stcg(mine + j * WIDE_THREADS, make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            u32* counter = &args.counters[blockIdx.y * args.total_strips + shard.first_strip + segment.strip];
            *block.last = atomicInc(counter, last - first) == last - first;
        }
        __syncthreads();
        if (!*block.last) return;
        __threadfence();
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.0f;
        for (u32 from = first; from <= last; ++from) {
            const float4* other = partials(from);
#pragma unroll
            for (int j = 0; j < TOKENS / 8; ++j) {
                const float4 v = __ldcg(other + j * WIDE_THREADS);
                sums[4 * j] += v.x, sums[4 * j + 1] += v.y, sums[4 * j + 2] += v.z, sums[4 * j + 3] += v.w;
            }
        }
    }
    const int g = block.lane >> 2, q = block.lane & 3, pair_warp = block.warp % PAIR_WARPS;
    float* outputs = block.staging + block.pair() * CHUNK * OUTPUT_PITCH;
    const u32 first_row = blockIdx.y * args.tile_rows, rows = min(args.tile_rows, args.rows - first_row);
    const u32 column = (2 * segment.strip + block.pair()) * STRIP + 4 * block.lane;
    const bool exists = column < shard.out_features;
    const uint2 svh = exists ? *reinterpret_cast<const uint2*>(shard.svh + column) : make_uint2(0, 0);
#pragma unroll
    for (int chunk = 0; chunk < TOKENS / CHUNK; ++chunk) {
        if (chunk * CHUNK >= rows) break;
#pragma unroll
        for (int group = 0; group < CHUNK / 8; ++group) {
            const float* s = sums + 4 * (chunk * CHUNK / 8 + group);
            float* row = outputs + (8 * group + 2 * q) * OUTPUT_PITCH + 16 * pair_warp + g;
            row[0] = s[0], row[OUTPUT_PITCH] = s[1], row[8] = s[2], row[OUTPUT_PITCH + 8] = s[3];
        }
        __syncthreads();
        for (u32 token = pair_warp; exists && token < min(CHUNK, rows - chunk * CHUNK); token += PAIR_WARPS) {
            const float4 value = *reinterpret_cast<const float4*>(outputs + token * OUTPUT_PITCH + 4 * block.lane);
            const u32 row = first_row + chunk * CHUNK + token;
            store_token(args, shard, value, args.scales[segment.shard * args.rows + row], svh, column, row, block.lane);
        }
        __syncthreads();
    }
}

// The A operand of the unit in the slot being read: four products' worth.
template <class K>
__device__ __forceinline__ void decode_unit(u32 (&a)[4][4], const WideBlock& block) {
    using W = typename K::Window;
    constexpr u32 tile_bytes = 4 * W::tile_words, row_bytes = 4 * HALF_TILES * tile_bytes + ROW_PAD;
    u32 words[W::words];
    load_words<K::half_bits>(words, SharedWords{block.ring.stage + (block.lane & 3) * row_bytes + block.warp * tile_bytes}, block.lane);
    decode_step<K, 0>(a[0], words);
    decode_step<K, 1>(a[1], words);
    decode_step<K, 2>(a[2], words);
    decode_step<K, 3>(a[3], words);
}

template <int TOKENS>
__device__ __forceinline__ void multiply_unit(float (&sums)[TOKENS / 2], const u32 (&a)[4][4], const WideRing& ring) {
    const u64 b = matrix_descriptor<TOKENS * 16>(ring.stage + ring.weight_bytes);
    warpgroup_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) WarpgroupMma<TOKENS>::run(sums, a[i], b + 2 * i * TOKENS);
    warpgroup_commit();
}

template <class K, int TOKENS>
__device__ __forceinline__ void run_wide_segment(WideBlock& block, const WideSegment& segment, u32 segment_end) {
    float sums[TOKENS / 2] = {};
    constexpr int BUFFERS = wide_buffers<TOKENS>();
    u32 a[BUFFERS][4][4];
    if (BUFFERS == 2) {
        block.wait_for_unit();
        decode_unit<K>(a[0], block);
    }
    for (bool more = true; more;) {
#pragma unroll
        for (int buffer = 0; buffer < BUFFERS; ++buffer) {
            if (BUFFERS == 1) {
                block.wait_for_unit();
                decode_unit<K>(a[0], block);
            }
            multiply_unit<TOKENS>(sums, a[buffer], block.ring);
            const u32 empty = block.ring.empty + 8 * block.ring.slot;
            block.ring.next();
            more = ++block.unit < segment_end;
            if (BUFFERS == 2 && more) {
                block.wait_for_unit();
                decode_unit<K>(a[1 - buffer], block);
            }
            warpgroup_wait();
            if (block.lane == 0) barrier_arrive(empty);
            if (!more) break;
        }
    }
    finish_wide<TOKENS>(sums, block, segment);
}

template <class... Ks> struct WideKinds {};

template <int TOKENS, class... Ks>
__device__ __forceinline__ void dispatch_wide(WideKinds<Ks...>, u32 kind, WideBlock& block, const WideSegment& segment, u32 end) {
    u32 index = 0;
    ((index++ == kind ? run_wide_segment<Ks, TOKENS>(block, segment, end) : void()), ...);
}

template <int TOKENS, class List>
__device__ __forceinline__ void linear_wide(const LinearArgs& args) {
    extern __shared__ __align__(128) u8 memory[];
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const u32 begin = range_begin(args, blockIdx.x), end = range_begin(args, blockIdx.x + 1);
    WideBlock block{args};
    block.warp = warp, block.lane = lane;

    // Shared memory: a flag and barriers, staging, the ring.
    constexpr u32 staging_at = 256;
    block.last = reinterpret_cast<u32*>(memory);
    block.staging = reinterpret_cast<float*>(memory + staging_at);
    WideRing& ring = block.ring;
    ring.stages = args.ring_units;
    ring.weight_bytes = 4 * args.half_stride;
    ring.stride = 4 * args.half_stride + args.activation_stride;
    ring.full = shared_address(memory) + 16, ring.empty = ring.full + 8 * ring.stages;
    ring.base = ring.stage = shared_address(memory) + staging_at + STAGING_BYTES;
    ring.slot = 0, ring.phase = 0;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < ring.stages; ++i) barrier_init(ring.full + 8 * i, 1), barrier_init(ring.empty + 8 * i, WIDE_WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    WideProducer& producer = block.producer;
    producer.cursor.unit = begin, producer.cursor.end = end;
    producer.filled = 0, producer.phase = 0;
    WideProducer first{};
    if (warp == 0) {
        if (producer.cursor.valid()) producer.cursor.seek(args);
        first = producer;
        for (u32 i = 0; i < ring.stages; ++i, producer.next(args, ring))
            if (producer.cursor.valid()) producer.template fetch<true, false>(ring);
    }
    let_next_start();
    wait_for_previous();
    if (warp == 0) {
        for (u32 i = 0; i < ring.stages; ++i, first.next(args, ring))
            if (first.cursor.valid()) first.template fetch<false, true>(ring);
        producer.phase = 0;  // the first refill waits for the first use
    }

    WideSegment segment{};
    block.unit = begin, block.held = wide_buffers<TOKENS>();
    for (u32 at = begin; at < end;) {
        while (segment.shard + 1 < args.shard_count && at >= args.shards[segment.shard + 1].first_unit) ++segment.shard;
        const ShardArgs& shard = args.shards[segment.shard];
        const u32 depth = shard.in_features / UNIT_IN;
        segment.strip = (at - shard.first_unit) / depth;
        segment.strip_begin = shard.first_unit + segment.strip * depth;
        segment.strip_end = segment.strip_begin + depth;
        const u32 segment_end = min(end, segment.strip_end);
        segment.complete = at == segment.strip_begin && segment_end == segment.strip_end;
        dispatch_wide<TOKENS>(List{}, shard.kind, block, segment, segment_end);
        at = segment_end;
    }
}

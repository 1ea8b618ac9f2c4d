// A block rotates the activations of its own k blocks into records, or loads what narrow/rotate.cu wrote in the same way.
//
// Eight lanes rotate one token's 128 channels of a k block, a warp four at once: shuffles bind here, and half of the transform's
// steps stay within a lane so. For few tokens it is latency that binds, and sixteen lanes take one, or a whole warp where there are
// no more than warps.
#pragma once
#include "base/launch.cuh"
#include "narrow/activations.cuh"

// A lane's values as they lie in memory.
template <int VECTORS>
struct Raw {
    uint4 x[VECTORS], suh[VECTORS];
};
// The first channel of a lane's vector.
template <int VECTORS>
__device__ __forceinline__ u32 channel_of(int vector, int lane) { return 64 * vector + 8 * (lane % (16 / VECTORS)); }

// True where x can be read 16 bytes at a time.
__device__ __forceinline__ bool reads_whole(const NarrowArgs& args) {
    return args.x_type != F32 && (args.in_width | args.x_stride) % 8 == 0 && reinterpret_cast<u64>(args.x) % 16 == 0;
}

template <int VECTORS>
__device__ __forceinline__ void load_scales(Raw<VECTORS>& raw, const NarrowShard& shard, const Rotation& at, int lane) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) raw.suh[i] = *reinterpret_cast<const uint4*>(shard.suh + at.block * HADAMARD_SIZE + channel_of<VECTORS>(i, lane));
}
template <int VECTORS>
__device__ __forceinline__ void load_input(Raw<VECTORS>& raw, const NarrowArgs& args, const Rotation& at, bool whole, int lane) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const u32 column = at.block * HADAMARD_SIZE + channel_of<VECTORS>(i, lane);
        raw.x[i] = {0, 0, 0, 0};
        if (whole && column < args.in_width)
            raw.x[i] = *reinterpret_cast<const uint4*>(static_cast<const u16*>(args.x) + at.row * args.x_stride + column);
    }
}

// Elements 2i, 2i + 1 of 16 bytes.
__device__ __forceinline__ u32 word_of(const uint4& words, int i) { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }

// x·suh, rotated, unscaled.
template <int VECTORS>
__device__ __forceinline__ void rotate_raw(float (&v)[8 * VECTORS], const Raw<VECTORS>& raw, const NarrowArgs& args, const Rotation& at, bool whole, int lane) {
    if (!whole) {
#pragma unroll
        for (int i = 0; i < 8 * VECTORS; ++i) {
            const u32 column = at.block * HADAMARD_SIZE + channel_of<VECTORS>(i / 8, lane) + i % 8;
            v[i] = column < args.in_width ? load_element(args.x, at.row * args.x_stride + column, args.x_type) : 0.0f;
        }
    } else if (args.x_type == F16) {
#pragma unroll
        for (int i = 0; i < 8 * VECTORS; ++i) v[i] = half_to_float(u16(word_of(raw.x[i / 8], i % 8 / 2) >> (i % 2 * 16)));
    } else {
#pragma unroll
        for (int i = 0; i < 8 * VECTORS; ++i) {
            const u32 word = word_of(raw.x[i / 8], i % 8 / 2);
            v[i] = __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
        }
    }
#pragma unroll
    for (int i = 0; i < 8 * VECTORS; ++i) v[i] *= half_to_float(u16(word_of(raw.suh[i / 8], i % 8 / 2) >> (i % 2 * 16)));
    hadamard128_part<16 / VECTORS>(v, lane);
}

// Activations of the k blocks [begin, end) of one shard, rotated by WARPS_OF_BLOCK warps. Scales and input of a warp's first rotation are
// issued early, and nothing but them lives meanwhile.
template <class K, u32 WARPS_OF_BLOCK>
struct Rotations {
    static constexpr u32 at_once = 32 / LANES<K>;
    u32 records, first, count, rows, first_block, depth;
    float inverse;
    bool whole;
    bool warp_wide;  // no more than warps, so that a whole warp takes each

    __device__ __forceinline__ Rotations(u32 memory, const NarrowArgs& args, const NarrowShard& shard, u32 begin, u32 end, u32 warp) {
        records = memory, depth = shard.depth;
        rows = min(static_cast<u32>(K::tile_rows), args.rows - blockIdx.y * K::tile_rows), count = (end - begin) * rows;
        first_block = begin - shard.first_k_block, first_block -= fast_divide(first_block, shard.depth_inverse) * depth;
        whole = reads_whole(args);
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(static_cast<float>(rows)));
        warp_wide = K::arithmetic == INTEGER && WARPS_OF_BLOCK == WARPS && whole && count <= WARPS_OF_BLOCK;
        first = warp_wide ? warp : at_once * warp;
    }
    __device__ __forceinline__ bool any() const { return first < count; }
    __device__ __forceinline__ bool more() const { return !warp_wide && first + at_once * WARPS_OF_BLOCK < count; }
    // Lanes that have none left do the last one again.
    __device__ __forceinline__ Rotation rotation(const NarrowArgs& args, int lane) const {
        return rotation_of(args, min(first + lane / LANES<K>, count - 1));
    }
    __device__ __forceinline__ Rotation rotation_of(const NarrowArgs& args, u32 index) const {
        const u32 k_block = static_cast<u32>((static_cast<float>(index) + 0.5f) * inverse), token = index - k_block * rows;
        u32 block = first_block + k_block;
        while (block >= depth) block -= depth;
        return {blockIdx.y * K::tile_rows + token, block, token, records + k_block * args.record_bytes};
    }
};
template <class K> using RawOf = Raw<16 / LANES<K>>;

// The same of a whole warp: four values a lane, the first half of a vector's words.
template <int VECTORS>
__device__ __forceinline__ void load_scales_warp_wide(Raw<VECTORS>& raw, const NarrowShard& shard, const Rotation& at, int lane) {
    const uint2 words = *reinterpret_cast<const uint2*>(shard.suh + at.block * HADAMARD_SIZE + 4 * lane);
    raw.suh[0].x = words.x, raw.suh[0].y = words.y;
}
template <int VECTORS>
__device__ __forceinline__ void load_input_warp_wide(Raw<VECTORS>& raw, const NarrowArgs& args, const Rotation& at, int lane) {
    const u32 column = at.block * HADAMARD_SIZE + 4 * lane;
    uint2 words = {0, 0};
    if (column < args.in_width) words = *reinterpret_cast<const uint2*>(static_cast<const u16*>(args.x) + at.row * args.x_stride + column);
    raw.x[0].x = words.x, raw.x[0].y = words.y;
}
template <class K>
__device__ __forceinline__ void rotate_warp_wide(const RawOf<K>& raw, const NarrowArgs& args, const Rotation& at, int lane) {
    using R = Record<K::arithmetic, K::tile_rows>;
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 word = i < 2 ? raw.x[0].x : raw.x[0].y, suh = i < 2 ? raw.suh[0].x : raw.suh[0].y;
        const float x = args.x_type == F16 ? half_to_float(u16(word >> i % 2 * 16)) : __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
        v[i] = x * half_to_float(u16(suh >> i % 2 * 16));
    }
    hadamard128(v, lane);
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits = max(bits, __float_as_uint(fabsf(v[i])));
    const Scale scale = scale_of(K::arithmetic, __uint_as_float(__reduce_max_sync(0xffffffffu, bits)));
    const u32 token = at.record + at.token * R::token_bytes;
    const u32 to = token + (lane >> 4) * R::k_half_bytes + (lane >> 2 & 3) * 16 + 8 * (lane >> 1 & 1) + 2 * (lane & 1) * R::quad_bytes;
    TwoPlanes<R> planes;
#pragma unroll
    for (int i = 0; i < 2; ++i) planes.store(to + i * R::quad_bytes, v[2 * i], v[2 * i + 1], scale.factor);
    planes.high_sum = __reduce_add_sync(0xffffffffu, planes.high_sum), planes.low_sum = __reduce_add_sync(0xffffffffu, planes.low_sum);
    planes.end(token, scale.descale, lane == 0);
}

// Rotates them; `raw` is on its way.
template <class K, u32 WARPS_OF_BLOCK, class F>
__device__ __forceinline__ void rotate_k_blocks(RawOf<K>& raw, Rotations<K, WARPS_OF_BLOCK>& rotations, const NarrowArgs& args,
                                             const NarrowShard& shard, int lane, const F& all_issued) {
    if (!rotations.any()) return;
    if constexpr (K::arithmetic == INTEGER && WARPS_OF_BLOCK == WARPS) {
        if (rotations.warp_wide) {
            return rotate_warp_wide<K>(raw, args, rotations.rotation_of(args, rotations.first), lane);
        }
    }
    Rotation at = rotations.rotation(args, lane);
#pragma unroll 1
    while (true) {
        Values<K> v;
        rotate_raw(v, raw, args, at, rotations.whole, lane);
        const Rotation done = at;
        rotations.first += rotations.at_once * WARPS_OF_BLOCK;
        const bool more = rotations.any();
        if (more) {
            at = rotations.rotation(args, lane);
            load_scales(raw, shard, at, lane), load_input(raw, args, at, rotations.whole, lane);
            if (!rotations.more()) all_issued();
        }
        store_rotated<K>(v, done, lane);
        if (!more) break;
    }
}

// Starts to fetch the same from what the rotating kernel wrote.
__device__ __forceinline__ void fetch_k_blocks(u32 records, const NarrowArgs& args, const NarrowShard& shard, u32 begin, u32 end) {
    const u32 depth = shard.depth, chunks = args.record_bytes / 16;
    const uint4* source = args.records + (static_cast<u64>(blockIdx.y) * args.total_records + shard.first_record) * chunks;
    u32 block = begin - shard.first_k_block;
    block -= fast_divide(block, shard.depth_inverse) * depth;
    while (begin < end) {  // up to the end of k, and from its beginning
        const u32 k_blocks = min(end - begin, depth - block);
#pragma unroll 1
        for (u32 chunk = threadIdx.x; chunk < k_blocks * chunks; chunk += THREADS)
            cp_async_16(records + 16 * chunk, reinterpret_cast<const u8*>(source + block * chunks + chunk));
        begin += k_blocks, records += 16 * k_blocks * chunks, block = 0;
    }
}

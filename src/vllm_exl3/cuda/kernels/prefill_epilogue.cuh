// The end of a tile: clusters that share it are added up; then output Hadamard, the row's scale, svh, bias, crop and cast.
//
// `Block` is the state of the 256 threads that hold a Hadamard block: args, staging, last (shared), place (which Hadamard
// block of the strip), warp, lane, thread among them, and sync().
#pragma once
#include "hadamard.cuh"
#include "prefill_tile.cuh"

__device__ __forceinline__ void copy_async(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

// Starts to fetch what the end of the tile needs: it must not wait for memory then.
template <class S, class Block>
__device__ __forceinline__ void fetch_scales(Block& block, const PrefillSegment& segment) {
    const PrefillArgs& args = block.args;
    const PrefillShard& shard = args.shards[segment.shard];
    const u32 row = segment.row_tile * S::TOKENS + block.thread, strip = S::STRIPS * segment.strip + block.place;
    if (block.thread < S::TOKENS && row < args.rows)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(&block.staging.undo[block.thread])),
                     "l"(args.scales + segment.shard * args.rows + row) : "memory");
    if (block.thread < STRIP / 8 && strip < shard.out_features / STRIP)
        copy_async(shared_address(&block.staging.svh[8 * block.thread]), shard.svh + strip * STRIP + 8 * block.thread);
}

// Adds what all clusters of a tile have, as a binary tree over their order in k. Of two siblings the one that comes first
// leaves its sums in memory and is done; the other adds them to its own. The sum of two does not depend on which that was, so
// neither does any bit. False for all but the block that is left with the total.
template <class S, class Block>
__device__ __forceinline__ bool add_clusters(float (&sums)[S::TOKENS / 2], Block& block, const PrefillSegment& segment) {
    const PrefillArgs& args = block.args;
    const u32 depth = args.in_features / UNIT_IN, begin = segment.cut_tile * depth;
    const u32 first = prefill_range_of_unit(args, begin), count = prefill_range_of_unit(args, begin + depth - 1) - first + 1;
    const u32 index = blockIdx.x / S::CLUSTER - first;
    const auto place = [&](u32 number) {  // a range shares at most the tiles at its two ends
        const u32 range = first + number, second = prefill_range_begin(args, range) < begin ? 1 : 0;
        return (second * args.ranges + range) * S::STRIPS + block.place;
    };
    const auto partials = [&](u32 number) { return args.partials + static_cast<u64>(place(number)) * args.partial_stride + block.thread; };
    for (u32 level = 0; 1u << level < count; ++level) {
        const u32 group = index >> level, right = (group | 1) << level;
        if (right >= count) continue;  // no sibling
        u32* counter = &args.counters[place(right)];  // every number but 0 is the first of one right sibling
        if (block.thread == 0) asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(*block.last) : "l"(counter) : "memory");
        block.sync();
        const bool ready = *block.last != 0;
        block.sync();
        if (!ready) {
            float4* mine = partials(group << level);
#pragma unroll
            for (int j = 0; j < S::TOKENS / 8; ++j)
                __stcg(mine + j * PAIR_THREADS, make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
            __threadfence();
            block.sync();
            if (block.thread == 0) *block.last = atomicAdd(counter, 1u);
            block.sync();
            if (*block.last == 0) return false;
        }
        __threadfence();
        const float4* other = partials((group ^ 1) << level);
#pragma unroll
        for (int j = 0; j < S::TOKENS / 8; ++j) {
            const float4 v = __ldcg(other + j * PAIR_THREADS);
            sums[4 * j] += v.x, sums[4 * j + 1] += v.y, sums[4 * j + 2] += v.z, sums[4 * j + 3] += v.w;
        }
        block.sync();
    }
    return true;
}

template <int OFFSET>
__device__ __forceinline__ void store_shared(u32 address, float value) {
    asm volatile("st.shared.f32 [%0 + %1], %2;" ::"r"(address), "n"(4 * OFFSET), "f"(value) : "memory");
}

// Puts a thread's sums of tokens 8·J and following, [token][channel].
template <int J>
__device__ __forceinline__ void stage_tokens(const float* sums, u32 address) {
    if constexpr (J < CHUNK / 8) {
        const float* d = sums + 4 * J;
        store_shared<8 * J * OUTPUT_PITCH>(address, d[0]);
        store_shared<(8 * J + 1) * OUTPUT_PITCH>(address, d[1]);
        store_shared<8 * J * OUTPUT_PITCH + 8>(address, d[2]);
        store_shared<(8 * J + 1) * OUTPUT_PITCH + 8>(address, d[3]);
        stage_tokens<J + 1>(sums, address);
    }
}

// The lane's part of a row: channels column + 32·j + 0..3 of the strip's stored ones.
struct RowPart {
    const PrefillArgs& args;
    const PrefillShard& shard;
    u32 column;
    bool whole;  // all columns are returned, and vectors of them are aligned

    __device__ __forceinline__ RowPart(const PrefillArgs& args, const PrefillShard& shard, u32 strip, u32 place)
        : args(args), shard(shard), column(strip * STRIP + place) {
        whole = strip * STRIP >= shard.crop_start && strip * STRIP + STRIP <= shard.crop_start + shard.crop_size &&
            ((args.out_stride | shard.out_column | shard.crop_start) & 3) == 0 && reinterpret_cast<u64>(args.out) % 16 == 0;
    }
    __device__ __forceinline__ void add_bias(float (&v)[4][4]) const {
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 kept = column + 32 * j + i - shard.crop_start;  // wraps below the crop: one comparison serves both ends
                if (kept < shard.crop_size) v[j][i] += load_element(args.bias, shard.out_column + kept, args.bias_type);
            }
    }
    __device__ __forceinline__ void store(const float (&v)[4][4], u32 row) const {
        const i64 at = row * args.out_stride + shard.out_column;
        if (!whole) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const u32 kept = column + 32 * j + i - shard.crop_start;
                    if (kept < shard.crop_size) store_element(args.out, at + kept, args.out_type, v[j][i]);
                }
            return;
        }
        const i64 first = at + (column - shard.crop_start);
        if (args.out_type == F32) {
            float4* to = reinterpret_cast<float4*>(static_cast<float*>(args.out) + first);
#pragma unroll
            for (int j = 0; j < 4; ++j) __stcs(to + 8 * j, make_float4(v[j][0], v[j][1], v[j][2], v[j][3]));
            return;
        }
        uint2* to = reinterpret_cast<uint2*>(static_cast<u16*>(args.out) + first);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 words[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (args.out_type == F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(v[j][2 * i + 1]), "f"(v[j][2 * i]));
                else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(v[j][2 * i + 1]), "f"(v[j][2 * i]));
            }
            __stcs(to + 8 * j, make_uint2(words[0], words[1]));  // not to displace activations in the L2
        }
    }
};

template <class S, class Block>
__device__ __forceinline__ void finish_tile(float (&sums)[S::TOKENS / 2], Block& block, const PrefillSegment& segment) {
    const PrefillArgs& args = block.args;
    asm volatile("cp.async.wait_all;" ::: "memory");  // what fetch_scales started; others' is there after the next barrier
    if (!segment.complete && !add_clusters<S>(sums, block, segment)) return;
    const PrefillShard& shard = args.shards[segment.shard];
    const u32 strip = S::STRIPS * segment.strip + block.place;
    if (strip >= shard.out_features / STRIP) return;  // a cluster's blocks beyond the shard's last
    const u32 first_row = segment.row_tile * S::TOKENS, rows = min(u32(S::TOKENS), args.rows - first_row);
    const int lane = block.lane, place = 4 * (lane & 7);
    const RowPart part(args, shard, strip, place);
    Staging& staging = block.staging;
#pragma unroll
    for (int j = 0; j < S::TOKENS / 2; j += 4) {  // the step of channel bit 3
        const float a = sums[j], b = sums[j + 1];
        sums[j] = a + sums[j + 2], sums[j + 1] = b + sums[j + 3];
        sums[j + 2] = a - sums[j + 2], sums[j + 3] = b - sums[j + 3];
    }
    const u32 staged = shared_address(&staging.outputs[0][2 * (lane & 3)][16 * block.warp + (lane >> 2)]);
    constexpr u32 chunk_bytes = sizeof(staging.outputs[0]);
    // Two chunks at once hide more latency, where there are registers for them and few warps.
    constexpr u32 at_once = S::PAIRS == 1 ? 2 : 1;
    const u32 token = 4 * block.warp + (lane >> 3);
#pragma unroll 1
    for (u32 first = 0; first * CHUNK < rows; first += at_once) {
        const u32 half = at_once == 1 ? first & 1 : 0;
        if (at_once == 2 && first > 0) block.sync();  // both halves have been read
#pragma unroll
        for (u32 c = 0; c < S::TOKENS / CHUNK; c += at_once) {  // registers have no run-time index
            if (c != first) continue;
#pragma unroll
            for (u32 i = 0; i < at_once; ++i) stage_tokens<0>(sums + (c + i) * (CHUNK / 2), staged + (half + i) * chunk_bytes);
        }
        block.sync();
        float v[at_once][4][4];
#pragma unroll
        for (u32 i = 0; i < at_once; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float4 values = *reinterpret_cast<const float4*>(&staging.outputs[half + i][token][place + 32 * j]);
                v[i][j][0] = values.x, v[i][j][1] = values.y, v[i][j][2] = values.z, v[i][j][3] = values.w;
            }
#pragma unroll
        for (u32 i = 0; i < at_once; ++i) hadamard128_rest(v[i], lane);
        float scales[at_once];
#pragma unroll
        for (u32 i = 0; i < at_once; ++i) scales[i] = staging.undo[(first + i) * CHUNK + token] * HADAMARD_SCALE;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint2 svh = *reinterpret_cast<const uint2*>(&staging.svh[place + 32 * j]);
            const u16 factors[4] = {u16(svh.x), u16(svh.x >> 16), u16(svh.y), u16(svh.y >> 16)};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float factor = half_to_float(factors[k]);
#pragma unroll
                for (u32 i = 0; i < at_once; ++i) v[i][j][k] = v[i][j][k] * scales[i] * factor;
            }
        }
#pragma unroll
        for (u32 i = 0; i < at_once; ++i) {
            const u32 row = (first + i) * CHUNK + token;
            if (row >= rows) break;
            if (args.bias != nullptr) part.add_bias(v[i]);
            part.store(v[i], first_row + row);
        }
        __syncwarp();
    }
    block.sync();  // the next tile's first chunk goes where this one's last may be
}

// The end of a tile: clusters that share it are added up; then output Hadamard, the row's scale, svh, bias, crop and cast.
//
// `Block` is the state of the 256 threads that hold a Hadamard block: args, staging (shared [CHUNK][OUTPUT_PITCH]), last
// (shared), place (which Hadamard block of the strip), warp, lane, thread among them, and sync().
#pragma once
#include "hadamard.cuh"
#include "prefill_tile.cuh"

// Adds what all clusters of a tile have, in the order of k, in the one that arrives last; elsewhere returns false.
template <class S, class Block>
__device__ __forceinline__ bool add_clusters(float (&sums)[S::TOKENS / 2], Block& block, const PrefillSegment& segment) {
    const PrefillArgs& args = block.args;
    const u32 depth = args.in_features / UNIT_IN, begin = segment.cut_tile * depth;
    const u32 first = prefill_range_of_unit(args, begin), last = prefill_range_of_unit(args, begin + depth - 1);
    const auto partials = [&](u32 range) {  // a range shares at most the tiles at its two ends
        const u32 second = prefill_range_begin(args, range) < begin ? 1 : 0;
        return args.partials + static_cast<u64>((second * args.ranges + range) * S::STRIPS + block.place) * args.partial_stride + block.thread;
    };
    float4* mine = partials(blockIdx.x / S::CLUSTER);
#pragma unroll
    for (int j = 0; j < S::TOKENS / 8; ++j)
        __stcg(mine + j * PAIR_THREADS, make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
    __threadfence();
    block.sync();
    if (block.thread == 0) *block.last = atomicInc(&args.counters[segment.cut_tile * S::STRIPS + block.place], last - first) == last - first;
    block.sync();
    if (!*block.last) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < S::TOKENS / 2; ++i) sums[i] = 0;
    for (u32 range = first; range <= last; ++range) {
        const float4* other = partials(range);
#pragma unroll
        for (int j = 0; j < S::TOKENS / 8; ++j) {
            const float4 v = __ldcg(other + j * PAIR_THREADS);
            sums[4 * j] += v.x, sums[4 * j + 1] += v.y, sums[4 * j + 2] += v.z, sums[4 * j + 3] += v.w;
        }
    }
    return true;
}

// Four neighbouring channels of one row times `scale`: svh and bias, then the returned columns are stored.
__device__ __forceinline__ void store_channels(const PrefillArgs& args, const PrefillShard& shard, float (&v)[4], float scale, u32 column,
                                               u32 row, bool whole) {
    const uint2 svh = *reinterpret_cast<const uint2*>(shard.svh + column);
    const u16 factors[4] = {u16(svh.x), u16(svh.x >> 16), u16(svh.y), u16(svh.y >> 16)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 kept = column + i - shard.crop_start;  // wraps below the crop, so one comparison serves both ends
        v[i] = v[i] * scale * half_to_float(factors[i]);
        if (args.bias != nullptr && kept < shard.crop_size) v[i] += load_element(args.bias, shard.out_column + kept, args.bias_type);
    }
    const i64 at = row * args.out_stride + shard.out_column;
    if (whole) {
        const u32 kept = column - shard.crop_start;
        if (args.out_type == F32) {
            *reinterpret_cast<float4*>(static_cast<float*>(args.out) + at + kept) = make_float4(v[0], v[1], v[2], v[3]);
            return;
        }
        u32 words[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (args.out_type == F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(v[2 * i + 1]), "f"(v[2 * i]));
            else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(v[2 * i + 1]), "f"(v[2 * i]));
        }
        *reinterpret_cast<uint2*>(static_cast<u16*>(args.out) + at + kept) = make_uint2(words[0], words[1]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 kept = column + i - shard.crop_start;
        if (kept < shard.crop_size) store_element(args.out, at + kept, args.out_type, v[i]);
    }
}

// A lane's part of a token: channels 4·(lane & 7) + 32·j + 0..3 for j = 0..3. H128 over all but the channel's bit 3, which the
// accumulators' own layout serves before.
__device__ __forceinline__ void hadamard_rest(float (&v)[4][4], int lane) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float a = v[j][0] + v[j][1], b = v[j][0] - v[j][1], c = v[j][2] + v[j][3], d = v[j][2] - v[j][3];
        v[j][0] = a + c, v[j][1] = b + d, v[j][2] = a - c, v[j][3] = b - d;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float a = v[0][i] + v[1][i], b = v[0][i] - v[1][i], c = v[2][i] + v[3][i], d = v[2][i] - v[3][i];
        v[0][i] = a + c, v[1][i] = b + d, v[2][i] = a - c, v[3][i] = b - d;
    }
#pragma unroll
    for (int step = 1; step <= 4; step *= 4) {  // channel bits 2 and 4
        const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) v[j][i] = fmaf(sign, v[j][i], __shfl_xor_sync(0xffffffffu, v[j][i], step));
    }
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

template <class S, class Block>
__device__ __forceinline__ void finish_tile(float (&sums)[S::TOKENS / 2], Block& block, const PrefillSegment& segment) {
    const PrefillArgs& args = block.args;
    if (!segment.complete && !add_clusters<S>(sums, block, segment)) return;
    const PrefillShard& shard = args.shards[segment.shard];
    const u32 strip = S::STRIPS * segment.strip + block.place;
    if (strip >= shard.out_features / STRIP) return;  // a cluster's blocks beyond the shard's last
    const u32 first_row = segment.row_tile * S::TOKENS, rows = min(u32(S::TOKENS), args.rows - first_row);
    const int lane = block.lane, place = 4 * (lane & 7);
    const u32 column = strip * STRIP + place;
    const bool whole = column - place >= shard.crop_start && column - place + STRIP <= shard.crop_start + shard.crop_size &&
        ((args.out_stride | shard.out_column | shard.crop_start) & 3) == 0 && reinterpret_cast<u64>(args.out) % 16 == 0;
    const float* scales = args.scales + segment.shard * args.rows + first_row;
#pragma unroll
    for (int j = 0; j < S::TOKENS / 2; j += 4) {  // the step of channel bit 3
        const float a = sums[j], b = sums[j + 1];
        sums[j] = a + sums[j + 2], sums[j + 1] = b + sums[j + 3];
        sums[j + 2] = a - sums[j + 2], sums[j + 3] = b - sums[j + 3];
        asm volatile("" : "+f"(sums[j]), "+f"(sums[j + 1]), "+f"(sums[j + 2]), "+f"(sums[j + 3]));  // one group after the other
    }
    const u32 staged = shared_address(block.staging + 2 * (lane & 3) * OUTPUT_PITCH + 16 * block.warp + (lane >> 2));
#pragma unroll 1
    for (u32 chunk = 0; chunk * CHUNK < rows; ++chunk) {
        block.sync();
#pragma unroll
        for (int c = 0; c < S::TOKENS / CHUNK; ++c)  // registers have no run-time index
            if (c == chunk) stage_tokens<0>(sums + c * (CHUNK / 2), staged);
        block.sync();
        const u32 token = 4 * block.warp + (lane >> 3), row = chunk * CHUNK + token;
        const float scale = row < rows ? scales[row] * HADAMARD_SCALE : 0.0f;
        float v[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float4 part = *reinterpret_cast<const float4*>(block.staging + token * OUTPUT_PITCH + place + 32 * j);
            v[j][0] = part.x, v[j][1] = part.y, v[j][2] = part.z, v[j][3] = part.w;
        }
        hadamard_rest(v, lane);
        if (row < rows)
#pragma unroll
            for (int j = 0; j < 4; ++j) store_channels(args, shard, v[j], scale, column + 32 * j, first_row + row, whole);
        __syncwarp();
    }
}

// The end of a tile: output Hadamard, the row's scale, svh, bias, crop and cast; or, of a part of a tile, its sums to memory.
//
// `Block` is the state of the 256 threads that hold a Hadamard block: args, staging, place (which Hadamard block of the
// strip), warp, lane, thread among them, and sync(). The block's transform takes a barrier and a trip through
// shared memory: of a row's 128 channels a thread then holds 64 or 32.
#pragma once
#include "hadamard.cuh"
#include "prefill_tile.cuh"

__device__ __forceinline__ void copy_async(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

// Starts to fetch what the end of a tile of `tokens` rows from `first_row` on needs: it must not wait for memory then.
template <class Block>
__device__ __forceinline__ void fetch_scales(Block& block, u32 shard_index, u32 strip, u32 first_row, u32 tokens) {
    const PrefillArgs& args = block.args;
    const PrefillShard& shard = args.shards[shard_index];
    const u32 row = first_row + block.thread;
    if (block.thread < tokens && row < args.rows)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(&block.staging.undo[block.thread])),
                     "l"(args.scales + shard_index * args.rows + row) : "memory");
    if (block.thread < STRIP / 8 && strip < shard.out_features / STRIP)
        copy_async(shared_address(&block.staging.svh[8 * block.thread]), shard.svh + strip * STRIP + 8 * block.thread);
    if (args.bias != nullptr && block.thread < STRIP) {
        const u32 kept = strip * STRIP + block.thread - shard.crop_start;  // wraps below the crop: one comparison serves both ends
        block.staging.bias[block.thread] = kept < shard.crop_size ? load_element(args.bias, shard.out_column + kept, args.bias_type) : 0.0f;
    }
}
template <class S, class Block>
__device__ __forceinline__ void fetch_scales(Block& block, const PrefillSegment& segment) {
    if (segment.complete)
        fetch_scales(block, segment.shard, S::STRIPS * segment.strip + block.place, segment.row_tile * S::TOKENS, S::TOKENS);
}

// Leaves the sums of a part of a tile in memory, where prefill_finish.cu adds the parts up.
template <class S, class Block>
__device__ __forceinline__ void leave_sums(const float (&sums)[S::TOKENS / 2], const Block& block, const PrefillSegment& segment) {
    const PrefillArgs& args = block.args;
    const u32 range = blockIdx.x / S::CLUSTER;
    float4* to = prefill_partials(args, range, segment.cut_tile * (args.in_features / UNIT_IN), block.place) + block.thread;
#pragma unroll
    for (int j = 0; j < S::TOKENS / 8; ++j)
        __stcg(to + j * PAIR_THREADS, make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
}

template <int OFFSET>
__device__ __forceinline__ void store_shared(u32 address, float value) {
    asm volatile("st.shared.f32 [%0 + %1], %2;" ::"r"(address), "n"(4 * OFFSET), "f"(value) : "memory");
}

// Puts a thread's sums of tokens 8·J and following, up to COUNT of them, [token][channel]. One step of the transform, that of
// channel bit 3, is done on the way: the accumulators hold both its values in one thread.
template <int COUNT, int J>
__device__ __forceinline__ void stage_tokens(const float* sums, u32 address) {
    if constexpr (J < COUNT / 8) {
        const float* d = sums + 4 * J;
        store_shared<8 * J * OUTPUT_PITCH>(address, d[0] + d[2]);
        store_shared<(8 * J + 1) * OUTPUT_PITCH>(address, d[1] + d[3]);
        store_shared<8 * J * OUTPUT_PITCH + 8>(address, d[0] - d[2]);
        store_shared<(8 * J + 1) * OUTPUT_PITCH + 8>(address, d[1] - d[3]);
        stage_tokens<COUNT, J + 1>(sums, address);
    }
}

template <int STEP, int COUNT>
__device__ __forceinline__ void butterflies(float (&v)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (!(i & STEP)) {
            const float a = v[i], b = v[i + STEP];
            v[i] = a + b, v[i + STEP] = a - b;
        }
    if constexpr (2 * STEP < COUNT) butterflies<2 * STEP>(v);
}

// A lane's part of a staged row: channels place + 16·j + 0..7, j < COUNT / 8. With 64 of them two lanes share a row, the second
// has the channels with bit 3; with 32 of them four do, the upper two have the channels with bit 6.
template <int COUNT>
struct RowPart {
    static constexpr u32 lanes = STRIP / COUNT, tokens = 32 / lanes;  // of a row; of a warp
    u32 token, place;

    __device__ __forceinline__ RowPart(int warp, int lane)
        : token(warp * tokens + lane % tokens), place(8 * (lane / tokens & 1) + 64 * (lane / tokens >> 1)) {}

    __device__ __forceinline__ static void rotate(float (&v)[COUNT], int lane) {
        butterflies<1>(v);
        if constexpr (lanes == 4) {
            const float sign = lane & 16 ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xffffffffu, v[i], 16));
        }
    }
    __device__ __forceinline__ void load(float (&v)[COUNT], const float* row) const {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            const float4 values = *reinterpret_cast<const float4*>(row + place + 16 * (i / 8) + i % 8);
            v[i] = values.x, v[i + 1] = values.y, v[i + 2] = values.z, v[i + 3] = values.w;
        }
    }
    __device__ __forceinline__ void keep(const float (&v)[COUNT], float* row) const {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4)
            *reinterpret_cast<float4*>(row + place + 16 * (i / 8) + i % 8) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
    }
    __device__ __forceinline__ void scale(float (&v)[COUNT], float factor, const u16* svh) const {
#pragma unroll
        for (int i = 0; i < COUNT; i += 8) {
            const uint4 raw = *reinterpret_cast<const uint4*>(svh + place + 2 * i);
            const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i + j] = v[i + j] * factor * half_to_float(u16(words[j / 2] >> 16 * (j & 1)));
        }
    }
    __device__ __forceinline__ void add_bias(float (&v)[COUNT], const float* bias) const {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            const float4 values = *reinterpret_cast<const float4*>(bias + place + 16 * (i / 8) + i % 8);
            v[i] += values.x, v[i + 1] += values.y, v[i + 2] += values.z, v[i + 3] += values.w;
        }
    }
    // To `first`, the place of the Hadamard block's first channel in the output, 16-byte aligned.
    __device__ __forceinline__ void store(const float (&v)[COUNT], const PrefillArgs& args, i64 first) const {
        if (args.out_type == F32) {
            float* to = static_cast<float*>(args.out) + first + place;
#pragma unroll
            for (int i = 0; i < COUNT; i += 4)
                __stcs(reinterpret_cast<float4*>(to + 16 * (i / 8) + i % 8), make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]));
            return;
        }
        u16* to = static_cast<u16*>(args.out) + first + place;
#pragma unroll
        for (int i = 0; i < COUNT; i += 8) {
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (args.out_type == F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[j]) : "f"(v[i + 2 * j + 1]), "f"(v[i + 2 * j]));
                else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[j]) : "f"(v[i + 2 * j + 1]), "f"(v[i + 2 * j]));
            }
            // Streaming, not to displace activations in the L2.
            __stcs(reinterpret_cast<uint4*>(to + 2 * i), make_uint4(words[0], words[1], words[2], words[3]));
        }
    }
};

// Where the columns of a Hadamard block go that is returned in part, or whose place in the output is not aligned.
struct Crop {
    const PrefillShard& shard;
    u32 first;   // stored column where the block begins
    bool whole;  // all columns are returned, and vectors of them are aligned

    __device__ __forceinline__ Crop(const PrefillArgs& args, const PrefillShard& shard, u32 strip) : shard(shard), first(strip * STRIP) {
        whole = first >= shard.crop_start && first + STRIP <= shard.crop_start + shard.crop_size &&
            ((args.out_stride | shard.out_column | shard.crop_start) & 7) == 0 && reinterpret_cast<u64>(args.out) % 16 == 0;
    }
    __device__ __forceinline__ i64 place(const PrefillArgs& args, u32 row) const {
        return row * args.out_stride + shard.out_column + first - shard.crop_start;
    }
    // `count` rows that a warp has finished in shared memory.
    __device__ __forceinline__ void store(const PrefillArgs& args, const float* from, u32 count, u32 row, int lane) const {
#pragma unroll 1
        for (u32 end = row + count; row < end; ++row, from += OUTPUT_PITCH)
#pragma unroll 1
            for (u32 channel = lane; channel < STRIP; channel += 32) {
                const u32 kept = first + channel - shard.crop_start;  // wraps below the crop
                if (kept < shard.crop_size) store_element(args.out, row * args.out_stride + shard.out_column + kept, args.out_type, from[channel]);
            }
    }
};

// Output Hadamard, scales, bias, crop and cast of `rows` rows from `first_row` on of one Hadamard block.
template <class S, class Block>
__device__ __forceinline__ void finish_rows(const float (&sums)[S::TOKENS / 2], Block& block, const PrefillShard& shard, u32 strip,
                                            u32 first_row, u32 rows) {
    const PrefillArgs& args = block.args;
    const int lane = block.lane;
    constexpr u32 at_once = STAGED<S>;
    using Part = RowPart<at_once / 2>;
    const Part part(block.warp, lane);
    Staging& staging = block.staging;
    const u32 staged = shared_address(staging.row(2 * (lane & 3)) + 16 * block.warp + (lane >> 2));
#pragma unroll
    for (u32 first = 0; first < S::TOKENS; first += at_once) {  // registers have no run-time index
        if (first >= rows) break;
        if (first > 0) block.sync();  // the tokens before have been read
        if (S::TOKENS - first >= at_once) stage_tokens<at_once, 0>(sums + first / 2, staged);
        else stage_tokens<S::TOKENS % at_once, 0>(sums + first / 2, staged);
        block.sync();
        float v[at_once / 2];
        part.load(v, staging.row(part.token));
        part.rotate(v, lane);
        const u32 token = first + part.token;
        part.scale(v, staging.undo[token] * HADAMARD_SCALE, staging.svh);
        if (args.bias != nullptr) part.add_bias(v, staging.bias);
        const Crop crop(args, shard, strip);
        if (crop.whole) {
            if (token < rows) part.store(v, args, crop.place(args, first_row + token));
        } else {
            __syncwarp();
            part.keep(v, staging.row(part.token));
            __syncwarp();
            const u32 mine = first + block.warp * Part::tokens;
            if (mine < rows) crop.store(args, staging.row(block.warp * Part::tokens), min(Part::tokens, rows - mine), first_row + mine, lane);
        }
    }
    block.sync();  // the next tile's tokens go where this one's last may be
}

template <class S, class Block>
__device__ __forceinline__ void finish_tile(const float (&sums)[S::TOKENS / 2], Block& block, const PrefillSegment& segment) {
    const PrefillArgs& args = block.args;
    const PrefillShard& shard = args.shards[segment.shard];
    const u32 strip = S::STRIPS * segment.strip + block.place, first_row = segment.row_tile * S::TOKENS;
    asm volatile("cp.async.wait_all;" ::: "memory");  // what fetch_scales started; others' is there after the next barrier
    if (strip >= shard.out_features / STRIP) return;  // a cluster's blocks beyond the shard's last
    if (segment.complete) finish_rows<S>(sums, block, shard, strip, first_row, min(u32(S::TOKENS), args.rows - first_row));
    else leave_sums<S>(sums, block, segment);
}

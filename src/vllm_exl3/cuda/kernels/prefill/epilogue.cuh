// The end of a tile: output Hadamard, the row's scale, svh, bias, crop and cast; or, of a part of a tile, its sums to memory.
//
// `Block` is the state of the 256 threads that hold a Hadamard block: args, staging, place (which Hadamard block of the
// n tile), warp, lane, thread among them, and sync(). The block's transform takes a barrier and a trip through
// shared memory: of a row's 128 channels a thread then holds 32.
#pragma once
#include "base/cp_async.cuh"
#include "base/hadamard.cuh"
#include "prefill/partials.cuh"
#include "prefill/shape.cuh"

// False for a cluster's blocks beyond the shard's last.
template <class S>
__device__ __forceinline__ bool has_block(const PrefillArgs& args, const PrefillWorkTile& work, u32 place) {
    return S::N_BLOCKS * work.n_tile + place < args.shards[work.shard].out_features / HADAMARD_SIZE;
}

// Starts to fetch what the end of a tile of `tokens` rows from `first_row` on needs, with `threads` threads.
__device__ __forceinline__ void fetch_scales(const PrefillArgs& args, Staging& staging, u32 shard_index, u32 n_block, u32 first_row, u32 tokens,
                                             u32 thread, u32 threads) {
    const PrefillShard& shard = args.shards[shard_index];
    for (u32 i = thread; i < min(tokens, args.rows - first_row); i += threads)
        cp_async_4(shared_address(&staging.descale[i]), args.scales + shard_index * args.rows + first_row + i);
    if (n_block >= shard.out_features / HADAMARD_SIZE) return;
    if (thread < HADAMARD_SIZE / 8) cp_async_16(shared_address(&staging.svh[8 * thread]), shard.svh + n_block * HADAMARD_SIZE + 8 * thread);
    if (args.bias == nullptr) return;
    for (u32 i = thread; i < HADAMARD_SIZE; i += threads) {
        const u32 kept = n_block * HADAMARD_SIZE + i - shard.crop_start;  // wraps below the crop: one comparison serves both finishes
        staging.bias[i] = kept < shard.crop_size ? load_element(args.bias, shard.out_column + kept, args.bias_type) : 0.0f;
    }
}
template <class S, class Block>
__device__ __forceinline__ void fetch_scales(Block& block, const PrefillWorkTile& work) {
    if (S::PAIRS > 1 || work.complete)  // two pairs end parts of tiles, too
        fetch_scales(block.args, block.staging, work.shard, S::N_BLOCKS * work.n_tile + block.place, work.row_tile * S::TOKENS, S::TOKENS,
                     block.thread, PAIR_THREADS);
}

// Stores the sums of a part of a tile in memory, where the parts will be added up.
template <class S, class Partials = HalfPartials, class Block>
__device__ __forceinline__ void store_partials(const typename Partials::Sum (&sums)[S::TOKENS / 2], const Block& block, const PrefillWorkTile& work) {
    const PrefillArgs& args = block.args;
    const u32 range = blockIdx.x / S::CLUSTER;
    uint4* to = prefill_partials<Partials>(args, range, work.split_tile * (args.in_features / BLOCK_K), block.place) + block.thread;
#pragma unroll
    for (u32 i = 0; i < S::TOKENS / 16; ++i) {
        uint4 split[Partials::VECTORS];
        Partials::pack(split, sums + 8 * i);
#pragma unroll
        for (u32 j = 0; j < Partials::VECTORS; ++j) __stcg(to + (Partials::VECTORS * i + j) * PAIR_THREADS, split[j]);
    }
}

template <int OFFSET>
__device__ __forceinline__ void store_shared(u32 address, float value) {
    asm volatile("st.shared.f32 [%0 + %1], %2;" ::"r"(address), "n"(4 * OFFSET), "f"(value) : "memory");
}

// Puts a thread's sums of tokens 8·J and following, up to 8·GROUPS, [token][channel]. One step of the transform, that of
// channel bit 3, is done on the way: the accumulators hold both its values in one thread.
template <int J, int GROUPS = STAGED / 8>
__device__ __forceinline__ void stage_tokens(const float* sums, u32 address) {
    if constexpr (J < GROUPS) {
        const float* d = sums + 4 * J;
        store_shared<8 * J * OUTPUT_PITCH>(address, d[0] + d[2]);
        store_shared<(8 * J + 1) * OUTPUT_PITCH>(address, d[1] + d[3]);
        store_shared<8 * J * OUTPUT_PITCH + 8>(address, d[0] - d[2]);
        store_shared<(8 * J + 1) * OUTPUT_PITCH + 8>(address, d[1] - d[3]);
        stage_tokens<J + 1, GROUPS>(sums, address);
    }
}

// Where a thread puts its sums of the first tokens.
__device__ __forceinline__ u32 staged_place(Staging& staging, int warp, int lane) {
    return shared_address(staging.row(2 * (lane & 3)) + 16 * warp + (lane >> 2));
}

// A row's channels to `first`, the first one's place in the output, 16-byte aligned: eight and eight, SPACING apart.
template <int SPACING, int COUNT>
__device__ __forceinline__ void store_vectors(const float (&v)[COUNT], const PrefillArgs& args, i64 first) {
    if (args.out_type == F32) {
        float* to = static_cast<float*>(args.out) + first;
#pragma unroll
        for (int i = 0; i < COUNT; i += 4)
            __stcs(reinterpret_cast<float4*>(to + SPACING * (i / 8) + i % 8), make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]));
        return;
    }
    u16* to = static_cast<u16*>(args.out) + first;
#pragma unroll
    for (int i = 0; i < COUNT; i += 8) {
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (args.out_type == F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[j]) : "f"(v[i + 2 * j + 1]), "f"(v[i + 2 * j]));
            else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[j]) : "f"(v[i + 2 * j + 1]), "f"(v[i + 2 * j]));
        }
        // Streaming, not to displace activations in the L2.
        __stcs(reinterpret_cast<uint4*>(to + SPACING * (i / 8)), make_uint4(words[0], words[1], words[2], words[3]));
    }
}

// A lane's part of a staged row: channels place + 16·j + 0..7, j < COUNT / 8. Of the lanes of a row every second one has the
// channels with bit 3, and with four of them the upper two have those with bit 6.
template <int COUNT>
struct RowPart {
    static constexpr u32 channels = COUNT, lanes = HADAMARD_SIZE / COUNT, rows = 32 / lanes;  // lanes of a row, rows of a warp
    u32 row, place;

    __device__ __forceinline__ explicit RowPart(int lane) : row(lane % rows), place(8 * (lane / rows & 1) + 64 * (lane / rows >> 1)) {}

    __device__ __forceinline__ static void rotate(float (&v)[COUNT], int lane) {
        butterflies<1>(v);
        if constexpr (lanes == 4) {
            const float sign = lane & 16 ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xffffffffu, v[i], 16));
        }
    }
    __device__ __forceinline__ void load(float (&v)[COUNT], const float* from) const {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            const float4 values = *reinterpret_cast<const float4*>(from + row * OUTPUT_PITCH + place + 16 * (i / 8) + i % 8);
            v[i] = values.x, v[i + 1] = values.y, v[i + 2] = values.z, v[i + 3] = values.w;
        }
    }
    __device__ __forceinline__ void store_shared_row(const float (&v)[COUNT], float* to) const {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4)
            *reinterpret_cast<float4*>(to + row * OUTPUT_PITCH + place + 16 * (i / 8) + i % 8) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
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
};

// Where the columns of a Hadamard block go that is returned in part, or whose place in the output is not aligned.
struct Crop {
    const PrefillShard& shard;
    u32 first;   // stored column where the block begins
    bool whole;  // all columns are returned, and vectors of them are aligned

    __device__ __forceinline__ Crop(const PrefillArgs& args, const PrefillShard& shard, u32 n_block) : shard(shard), first(n_block * HADAMARD_SIZE) {
        whole = first >= shard.crop_start && first + HADAMARD_SIZE <= shard.crop_start + shard.crop_size &&
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
            for (u32 channel = lane; channel < HADAMARD_SIZE; channel += 32) {
                const u32 kept = first + channel - shard.crop_start;  // wraps below the crop
                if (kept < shard.crop_size) store_element(args.out, row * args.out_stride + shard.out_column + kept, args.out_type, from[channel]);
            }
    }
};

// Rotates, scales and stores what a warp has of staged rows. `from`: the warp's first row in shared memory, which is row `token`
// of a tile that has `rows` rows and begins at row `first_row`.
template <class Part>
__device__ __forceinline__ void finish_part(const PrefillArgs& args, Staging& staging, const PrefillShard& shard, u32 n_block, float* from,
                                            u32 token, u32 first_row, u32 rows, int lane) {
    const Part split(lane);
    float v[Part::channels];
    split.load(v, from);
    split.rotate(v, lane);
    split.scale(v, staging.descale[token + split.row] * HADAMARD_SCALE, staging.svh);
    if (args.bias != nullptr) split.add_bias(v, staging.bias);
    const Crop crop(args, shard, n_block);
    if (crop.whole) {
        if (token + split.row < rows) store_vectors<16>(v, args, crop.place(args, first_row + token + split.row) + split.place);
    } else {
        __syncwarp();
        split.store_shared_row(v, from);
        __syncwarp();
        if (token < rows) crop.store(args, from, min(Part::rows, rows - token), first_row + token, lane);
    }
}

// Output Hadamard, scales, bias, crop and cast of `rows` rows from `first_row` on of one Hadamard block.
template <class S, class Block>
__device__ __forceinline__ void finish_rows(const float (&sums)[S::TOKENS / 2], Block& block, const PrefillShard& shard, u32 n_block,
                                            u32 first_row, u32 rows) {
    using Part = RowPart<STAGED / 2>;
    Staging& staging = block.staging;
    const u32 mine = block.warp * Part::rows, staged = staged_place(staging, block.warp, block.lane);
#pragma unroll
    for (u32 first = 0; first < S::TOKENS; first += STAGED) {  // registers have no run-time index
        if (first >= rows) break;
        if (first > 0) block.sync();  // the tokens before have been read
        stage_tokens<0>(sums + first / 2, staged);
        block.sync();
        finish_part<Part>(block.args, staging, shard, n_block, staging.row(mine), first + mine, first_row, rows, block.lane);
    }
    block.sync();  // the next tile's tokens go where this one's last may be
}

template <class S, class Block>
__device__ __forceinline__ void finish_tile(const float (&sums)[S::TOKENS / 2], Block& block, const PrefillWorkTile& work) {
    const PrefillArgs& args = block.args;
    const PrefillShard& shard = args.shards[work.shard];
    const u32 n_block = S::N_BLOCKS * work.n_tile + block.place, first_row = work.row_tile * S::TOKENS;
    cp_async_wait_all();  // what fetch_scales started; others' is there after the next barrier
    if (!has_block<S>(args, work, block.place)) return;
    if (work.complete) finish_rows<S>(sums, block, shard, n_block, first_row, min(u32(S::TOKENS), args.rows - first_row));
    else store_partials<S>(sums, block, work);
}

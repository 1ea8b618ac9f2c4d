// Trellis to dense weights, one 128×128 block a thread block: Ŵ itself, or diag(suh)·H·Ŵ·H·diag(svh).
//
// The caller defines INSTANCE_HALF_BITS and INSTANCE_CODEBOOK. The output is row-major [in_features, …], columns cropped like the linear's.
#include "base/codebook.cuh"
#include "base/hadamard.cuh"
#include "wide/arguments.cuh"
#include "base/window.cuh"

constexpr int DEQUANTIZE_THREADS = 256;
constexpr int PITCH = 129;  // odd: both the row-wise and the column-wise pass are free of bank conflicts

struct GlobalWords {
    const u32* tile;
    __device__ __forceinline__ u32 one(int index) const { return __ldg(tile + index); }
    template <int COUNT>
    __device__ __forceinline__ void run(u32 (&words)[COUNT], int first) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) words[i] = one(first + i);
    }
};

template <int P>
__device__ __forceinline__ void decode_positions(float* block, const u32 (&words)[Window<INSTANCE_HALF_BITS>::words]) {
    if constexpr (P < 32) {
        using W = Window<INSTANCE_HALF_BITS>;
        const u32 weights = decode_pair<INSTANCE_CODEBOOK, W::twice>(W::template get<P>(words), W::template get<P + 1>(words));
        constexpr int k = 2 * (P >> 3) + 8 * (P >> 1 & 1), channel = 8 * (P >> 2 & 1);
        block[k * PITCH + channel] = half_to_float(u16(weights));
        block[(k + 1) * PITCH + channel] = half_to_float(u16(weights >> 16));
        decode_positions<P + 2>(block, words);
    }
}

// H over 128 values `step` apart, times `factor` and the channels' own scale where given; one warp.
__device__ __forceinline__ void rotate(float* values, int step, const u16* scales, int lane) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = values[(4 * lane + i) * step];
    hadamard128(v, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[(4 * lane + i) * step] = v[i] * HADAMARD_SCALE * half_to_float(scales[4 * lane + i]);
}

extern "C" __global__ void __launch_bounds__(DEQUANTIZE_THREADS) exl3_dequantize(
    const ShardArgs shard, void* out, i64 out_stride, u32 out_type, u32 rotated) {
    extern __shared__ float block[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const u32 tiles = shard.out_features / 16, first_k = blockIdx.y * 128, first_n = blockIdx.x * 128;
    // A warp step decodes 4 k-tiles × 1 tile column, as in the GEMM.
    for (int step = warp; step < 16; step += DEQUANTIZE_THREADS / 32) {
        const u32 tile_k = (step >> 3) * 4 + (lane & 3), tile_n = step & 7;
        const u64 index = static_cast<u64>(first_k / 16 + tile_k) * tiles + first_n / 16 + tile_n;
        u32 words[Window<INSTANCE_HALF_BITS>::words];
        load_words<INSTANCE_HALF_BITS>(words, GlobalWords{shard.trellis + index * Window<INSTANCE_HALF_BITS>::tile_words}, lane);
        decode_positions<0>(block + tile_k * 16 * PITCH + tile_n * 16 + (lane >> 2), words);
    }
    __syncthreads();
    if (!rotated) {
        for (int k = warp; k < 128; k += DEQUANTIZE_THREADS / 32) rotate(block + k * PITCH, 1, shard.svh + first_n, lane);
        __syncthreads();
        for (int n = warp; n < 128; n += DEQUANTIZE_THREADS / 32) rotate(block + n, PITCH, shard.suh + first_k, lane);
        __syncthreads();
    }
    for (u32 i = threadIdx.x; i < 128 * 128; i += DEQUANTIZE_THREADS) {
        const u32 k = i / 128, n = i % 128, kept = first_n + n - shard.crop_start;
        if (kept < shard.crop_size)
            store_element(out, (first_k + k) * out_stride + shard.out_column + kept, out_type, block[k * PITCH + n]);
    }
}

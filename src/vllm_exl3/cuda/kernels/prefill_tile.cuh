// What the prefill kernels of every architecture share: kinds, the shape of a tile, and decoding to the A operand.
#pragma once
#include "codebook.cuh"
#include "prefill_problem.cuh"
#include "window.cuh"

constexpr int PAIR_WARPS = 8, PAIR_THREADS = 32 * PAIR_WARPS;  // that hold one Hadamard block, a tile column a warp
constexpr u32 WEIGHT_PAD = 32;  // bytes after each k-tile's row: makes the lanes' reads free of bank conflicts
constexpr int CHUNK = 32;       // tokens whose outputs are in shared memory at once
constexpr u32 OUTPUT_PITCH = STRIP + 4;
constexpr u32 BARRIER_BYTES = 512;

// Shared memory of the end of a tile, one a pair of warpgroups. A chunk is read from one half while the next is written.
struct Staging {
    float outputs[2][CHUNK][OUTPUT_PITCH];
    float undo[256];  // of the tile's rows
    u16 svh[STRIP];
};
constexpr u32 STAGING_BYTES = sizeof(Staging);

// Tokens of a tile; pairs of warpgroups a block and blocks a cluster, which share the activations.
template <int TOKENS_, int PAIRS_, int CLUSTER_>
struct Shape {
    static constexpr int TOKENS = TOKENS_, PAIRS = PAIRS_, CLUSTER = CLUSTER_, STRIPS = PAIRS * CLUSTER;
    static constexpr u32 activation_bytes = TOKENS * 128;
};


template <int HALF_BITS, int CODEBOOK>
struct PrefillKind {
    static constexpr int half_bits = HALF_BITS, codebook = CODEBOOK;
    using Window = ::Window<HALF_BITS>;
};
template <class... Ks> struct PrefillKinds {};

struct SharedRow {
    u32 address;
    __device__ __forceinline__ u32 one(int index) const {
        u32 word;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address + 4 * index) : "memory");
        return word;
    }
    template <int COUNT>
    __device__ __forceinline__ void run(u32 (&words)[COUNT], int first) const {
        const u32 at = address + 4 * first;
        if constexpr (COUNT % 4 == 0) {
#pragma unroll
            for (int i = 0; i < COUNT; i += 4)
                asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(words[i]), "=r"(words[i + 1]),
                             "=r"(words[i + 2]), "=r"(words[i + 3]) : "r"(at + 4 * i) : "memory");
        } else if constexpr (COUNT % 2 == 0) {
#pragma unroll
            for (int i = 0; i < COUNT; i += 2)
                asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(words[i]), "=r"(words[i + 1])
                             : "r"(at + 4 * i) : "memory");
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) words[i] = one(first + i);
        }
    }
};

// The A operand of product I of a unit: k-slots of lane q are k = 2I, 2I+1, 2I+8, 2I+9 of k-tile q, rows are channels.
template <class K, int I>
__device__ __forceinline__ void decode_product(u32 (&a)[4], const u32 (&words)[K::Window::words]) {
    using W = typename K::Window;
    a[0] = decode_pair<K::codebook>(W::template get<8 * I>(words), W::template get<8 * I + 1>(words));
    a[1] = decode_pair<K::codebook>(W::template get<8 * I + 4>(words), W::template get<8 * I + 5>(words));
    a[2] = decode_pair<K::codebook>(W::template get<8 * I + 2>(words), W::template get<8 * I + 3>(words));
    a[3] = decode_pair<K::codebook>(W::template get<8 * I + 6>(words), W::template get<8 * I + 7>(words));
}

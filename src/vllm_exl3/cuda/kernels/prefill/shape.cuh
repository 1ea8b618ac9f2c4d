// Shared by the prefill kernels of every architecture: kinds, the shape of a tile, and decoding to the A operand.
#pragma once
#include "base/fragments.cuh"
#include "prefill/arguments.cuh"

constexpr u32 BARRIER_BYTES = 512;

// Tokens of a tile; pairs of warpgroups a block and blocks a cluster, which share the activations.
template <int TOKENS_, int PAIRS_, int CLUSTER_>
struct Shape {
    static constexpr int TOKENS = TOKENS_, PAIRS = PAIRS_, CLUSTER = CLUSTER_, N_BLOCKS = PAIRS * CLUSTER;
    static constexpr u32 activation_bytes = TOKENS * 128;
};

// Shared memory of the end of a tile, one a pair of warpgroups; outputs lie behind it, [token][channel].
struct Staging {
    float bias[HADAMARD_SIZE];
    float descale[256];  // of the tile's rows
    u16 svh[HADAMARD_SIZE];

    __device__ __forceinline__ float* row(u32 token) { return reinterpret_cast<float*>(this + 1) + token * OUTPUT_PITCH; }
};
constexpr u32 STAGED = 64;  // tokens whose outputs are in shared memory at once
constexpr u32 STAGING_BYTES = sizeof(Staging) + 4 * STAGED * OUTPUT_PITCH;

template <int HALF_BITS, int CODEBOOK>
struct PrefillKind {
    static constexpr int half_bits = HALF_BITS, codebook = CODEBOOK;
    using Window = ::Window<HALF_BITS>;
};
template <class... Ks> struct PrefillKinds {};

// The GEMM for up to 128 tokens and the kernel that rotates its input on the host, behind functions for ctypes. The blocks of a
// cluster of gemm/rotate.cu are one block of the emulator, each with shared variables of its own.
#include "ptx.h"
#include "base/barrier.cuh"

inline void ptx_setmaxnreg_dec_sync_aligned_u32(int) {}
inline void ptx_setmaxnreg_inc_sync_aligned_u32(int) {}
inline void ptx_fence_proxy_async() {}
inline void ptx_prefetch_global_L1(const void* at) { (void)*static_cast<const volatile char*>(at); }  // so that it must exist
inline void ptx_st_shared_f32(u32 at, int offset, float value) { ptx_st_shared_f32(at + offset, value); }
inline void ptx_cvt_rn_f16x2_f32(u32& word, float high, float low) { word = half_bits_of(high) << 16 | half_bits_of(low); }
inline void ptx_cvt_rn_bf16x2_f32(u32& word, float high, float low) {
    uint16_t bits[2];
    ptx_cvt_rn_bf16_f32(bits[0], low), ptx_cvt_rn_bf16_f32(bits[1], high);
    word = u32(bits[1]) << 16 | bits[0];
}
inline void ptx_dp4a_u32_s32(u32& d, u32 a, u32 b, u32 c) {
    d = c;
    for (int i = 0; i < 32; i += 8) d += u32(int(a >> i & 255) * int(int8_t(b >> i & 255)));
}
inline void ptx_cvt_rni_sat_s8_f32(int& value, float from) { value = int(std::min(127.0f, std::max(-128.0f, std::nearbyint(from)))); }
template <class T> inline void __stcg(T* to, T value) { *to = value; }
template <class T> inline void __stcs(T* to, T value) { *to = value; }
// As the device's base/wgmma.cuh makes it.
template <int K_STEP>
inline u64 matrix_descriptor(u32 address) { return u64(128 >> 4) << 32 | (address >> 4 | u32(K_STEP >> 4) << 16); }

#include "gemm/gemm.cuh"
#include "base/row_scale.cuh"

using OneKind = GemmKinds<GemmKind<8, MUL1, HALF>>;
using TwoRates = GemmKinds<GemmKind<5, MUL1, HALF>, GemmKind<8, MUL1, HALF>>;
using TwoCodebooks = GemmKinds<GemmKind<6, MCG, HALF>, GemmKind<8, MUL1, HALF>>;
using Halves = GemmKinds<GemmKind<4, INST3, HALF>>;
using Bytes = GemmKinds<GemmKind<5, MUL1, BYTE>, GemmKind<8, MUL1, BYTE>>;

template <int TOKENS>
void multiply_kinds(const PrefillArgs& args, int kinds) {
    if (kinds == 0) gemm<TOKENS, OneKind>(args);
    else if (kinds == 1) gemm<TOKENS, TwoRates>(args);
    else if (kinds == 2) gemm<TOKENS, TwoCodebooks>(args);
    else if (kinds == 3) gemm<TOKENS, Halves>(args);
    else if constexpr (TOKENS != 8) gemm<TOKENS, Bytes>(args);
}
// `kinds`: which of the lists above the layer has. Blocks run one after the other, the last one first where `backwards`.
extern "C" void multiply(const PrefillArgs* args, u32 grid, u32 threads, u32 shared, int kinds, int backwards) {
    kernel_body = [=] {
        if (args->tile_rows == 8) multiply_kinds<8>(*args, kinds);
        else if (args->tile_rows == 24) multiply_kinds<24>(*args, kinds);
        else if (args->tile_rows == 32) multiply_kinds<32>(*args, kinds);
        else if (args->tile_rows == 64) multiply_kinds<64>(*args, kinds);
        else if (args->tile_rows == 128) multiply_kinds<128>(*args, kinds);
        else stop("a tile that was not compiled for the host");
    };
    threads_a_block = threads, blocks_x = grid, blocks_y = 1, shared_limit = shared, block_y = 0;
    for (u32 i = 0; i < grid && !failure; ++i) block_x = backwards ? grid - 1 - i : i, run_block(false);
}

// Byte sums of the states s and other(s), as the loop makes them of two neighbours: [complements of first, second][state].
template <bool FIRST, bool SECOND>
void sums_of_states(u32* out) {
    for (u32 s = 0; s < 65536; ++s) out[s] = small_byte_sums<FIRST, SECOND>(product_word<MUL1>(s), product_word<MUL1>(s * 40503u & 65535u));
}
extern "C" void byte_sums_of_states(u32* out) {
    sums_of_states<false, false>(out), sums_of_states<false, true>(out + 65536);
    sums_of_states<true, false>(out + 131072), sums_of_states<true, true>(out + 196608);
}
extern "C" int is_complemented(u32 k) { return complemented(k); }
extern "C" void constants(float* out) { out[0] = BYTE_SUM_SCALE, out[1] = BYTE_SUM_OFFSET, out[2] = COMPLEMENT_OFFSET; }

// A variable in shared memory that every block of a cluster has.
static unsigned cluster_size;
static unsigned rank_of_thread() { return running / 256; }
template <class T>
struct OfBlock {
    struct alignas(64) { T value; } all[4];
    T* operator&() { return &all[rank_of_thread()].value; }
    operator T() { return *&*this; }
    void operator=(T value) { *&*this = value; }
};
static Meeting block_meetings[4];
static void meet_block() { block_meetings[rank_of_thread()].wait(256); }
// A cluster's barrier in two halves.
static unsigned arrivals, cluster_round, rounds[MAX_THREADS];
static void arrive_at_cluster() {
    rounds[running] = cluster_round;
    if (++arrivals == threads_a_block) arrivals = 0, ++cluster_round;
}
static void wait_for_arrivals() { while (cluster_round == rounds[running]) switch_thread(); }
inline unsigned address_in(unsigned address, unsigned rank) { return address + (rank - rank_of_thread()) * 64; }
inline void max_remote(unsigned at, unsigned value, unsigned barrier) {
    unsigned* to = reinterpret_cast<unsigned*>(memory + int(at - SHARED_BASE));  // the variable, wherever its thread has it
    *to = std::max(*to, value);
    host_barriers[barrier].bytes -= 4, host_barriers[barrier].check();
}

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef SHARED_TYPE
#define threadIdx (Index{unsigned(running) % 256})
#define blockIdx (Index2{block_x * cluster_size + rank_of_thread(), block_y})
#define blockDim (Index{256})
#define SHARED_TYPE(T) OfBlock<T>
#define __syncthreads meet_block
#define cluster_arrive arrive_at_cluster
#define cluster_wait wait_for_arrivals
#define map_to_rank address_in

inline void store_remote_async(unsigned at, float value, unsigned barrier) {
    *reinterpret_cast<float*>(memory + int(at - SHARED_BASE)) = value;
    host_barriers[barrier].bytes -= 4, host_barriers[barrier].check();
}
inline float rsqrtf(float a) { return 1.0f / std::sqrt(a); }

#define INSTANCE_TRANSFORMS 1
#define INSTANCE_BYTES 0
#define INSTANCE_INPUT 0
namespace one {
#define exl3_gemm_rotate rotate_one
#include "gemm/rotate.cu"
}
#undef exl3_gemm_rotate
#undef INSTANCE_INPUT
#define INSTANCE_INPUT 1
namespace norm {
#define exl3_gemm_rotate rotate_norm
#include "gemm/rotate.cu"
}
#undef exl3_gemm_rotate
#undef INSTANCE_INPUT
#define INSTANCE_INPUT 2
namespace product {
#define exl3_gemm_rotate rotate_product
#include "gemm/rotate.cu"
}
#undef exl3_gemm_rotate
#undef INSTANCE_INPUT
#undef INSTANCE_BYTES
#define INSTANCE_INPUT 0
#define INSTANCE_BYTES 1
namespace bytes {
#define exl3_gemm_rotate rotate_bytes
#include "gemm/rotate.cu"
}
#undef exl3_gemm_rotate
#undef INSTANCE_BYTES
#undef INSTANCE_TRANSFORMS
#define INSTANCE_TRANSFORMS 4
#define INSTANCE_BYTES 0
namespace four {
#define exl3_gemm_rotate rotate_four
#include "gemm/rotate.cu"
}

// With one 128-block a warp, or four, or one that is rounded to int8, or one behind a norm or an activation.
extern "C" void rotate(const PrefillArgs* args, u32 transforms, int to_bytes, u32 input) {
    cluster_size = args->cluster_size;
    launch(args->rows, args->shard_count, 256 * cluster_size, SHARED_BYTES, [=] {
        if (to_bytes) bytes::rotate_bytes(*args);
        else if (input == 1) norm::rotate_norm(*args);
        else if (input == 2) product::rotate_product(*args);
        else if (transforms == 1) one::rotate_one(*args);
        else four::rotate_four(*args);
    });
}

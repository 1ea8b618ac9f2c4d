// The prefill kernels of the fast mode on the host, behind functions for ctypes: tiles of 192 tokens, without a cluster.
#include "ptx.h"
#include "base/barrier.cuh"

// Of clusters, which are not run here.
#define bulk_copy_multicast(...) stop("clusters")
#define mbarrier_arrive_remote(...) stop("clusters")
#define cluster_rank() (stop("clusters"), 0u)
#define cluster_sync() stop("clusters")

inline void ptx_setmaxnreg_dec_sync_aligned_u32(int = 0) {}
inline void ptx_setmaxnreg_inc_sync_aligned_u32(int = 0) {}
inline void ptx_bar_arrive(u32 barrier, unsigned count) {
    Meeting& meeting = named_meetings[barrier];
    if (++meeting.arrived == count) meeting.arrived = 0, ++meeting.round;
}
inline void ptx_st_shared_f32(u32 at, int offset, float value) { ptx_st_shared_f32(at + offset, value); }
inline void ptx_st_shared_u32(u32 at, int offset, u32 value) { memcpy(shared_bytes(at + offset, 4), &value, 4); }
inline void ptx_cvt_rn_f16x2_f32(u32& word, float high, float low) { word = half_bits_of(high) << 16 | half_bits_of(low); }
template <class... Operands> inline void ptx_cvt_rn_bf16x2_f32(Operands&&...) { stop("packed bfloat16"); }
template <class T> inline void __stcg(T* to, T value) { *to = value; }
template <class T> inline void __stcs(T* to, T value) { *to = value; }
// As base/wgmma.cuh makes it.
template <int K_STEP>
inline u64 matrix_descriptor(u32 address) { return u64(128 >> 4) << 32 | (address >> 4 | u32(K_STEP >> 4) << 16); }

#include "prefill/int8.cuh"
#define INSTANCE_PARTIALS IntPartials
#include "prefill/reduce.cu"
#include "prefill/quantize.cu"

extern "C" void quantize(const PrefillArgs* args, u32 blocks, u32 shards, u32 threads) {
    launch(blocks, shards, threads, SHARED_BYTES, [=] { exl3_prefill_quantize(*args); });
}

// Layers whose shards have K = 4 and, second, 2.5 or 3.
extern "C" void multiply(const PrefillArgs* args, u32 grid, u32 threads, u32 shared, int half_bits) {
    using S = ByteShape<192, 1>;
    launch(grid, 1, threads, shared, [=] {
        if (half_bits == 5) prefill_int8<S, PrefillKinds<PrefillKind<5, 2>, PrefillKind<8, 2>>>(*args);
        else prefill_int8<S, PrefillKinds<PrefillKind<6, 2>, PrefillKind<8, 2>>>(*args);
    });
}

extern "C" void finish(const PrefillArgs* args, u32 grid_x, u32 grid_y) {
    launch(grid_x, grid_y, PAIR_THREADS, SHARED_BYTES, [=] { exl3_prefill_finish(*args); });
}

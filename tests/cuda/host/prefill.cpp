// The prefill kernels on the host, behind functions for ctypes: every tile, in clusters of one block.
#include "ptx.h"
#include "base/barrier.cuh"

// Clusters of one block.
inline u32 rank_of_one() { return 0; }
#define cluster_rank rank_of_one
#define cluster_sync __syncthreads
#define mbarrier_arrive_remote(barrier, rank) mbarrier_arrive(barrier)
#define bulk_copy_multicast(target, source, bytes, barrier, blocks) bulk_copy(target, source, bytes, barrier)

inline void ptx_setmaxnreg_dec_sync_aligned_u32(int) {}
inline void ptx_setmaxnreg_inc_sync_aligned_u32(int) {}
inline void ptx_st_shared_u32(u32 at, int offset, u32 value) { memcpy(shared_bytes(at + offset, 4), &value, 4); }
inline void ptx_st_shared_f32(u32 at, int offset, float value) { ptx_st_shared_f32(at + offset, value); }
inline void ptx_cvt_rn_f16x2_f32(u32& word, float high, float low) { word = half_bits_of(high) << 16 | half_bits_of(low); }
template <class... Operands> inline void ptx_cvt_rn_bf16x2_f32(Operands&&...) { stop("packed bfloat16"); }
template <class T> inline void __stcg(T* to, T value) { *to = value; }
template <class T> inline void __stcs(T* to, T value) { *to = value; }
// As the device's base/wgmma.cuh makes it.
template <int K_STEP>
inline u64 matrix_descriptor(u32 address) { return u64(128 >> 4) << 32 | (address >> 4 | u32(K_STEP >> 4) << 16); }

#include "prefill/prefill.cuh"
#define INSTANCE_PARTIALS HalfPartials
#include "prefill/reduce.cu"
#include "prefill/transform.cu"

extern "C" void transform(const PrefillArgs* args, u32 blocks, u32 threads, u32 shared) {
    launch(blocks, 1, threads, shared + 1024, [=] { exl3_prefill_transform(*args); });
}
template <class Kinds>
void multiply_kinds(const PrefillArgs& args) {
    if (args.tile_rows == 64) prefill<Shape<64, 2, 1>, 24, 112, Kinds>(args);
    else if (args.tile_rows == 128) prefill<Shape<128, 2, 1>, 24, 112, Kinds>(args);
    else if (args.tile_rows == 192) prefill<Shape<192, 1, 1>, 24, 240, Kinds>(args);
    else prefill<Shape<256, 1, 1>, 24, 240, Kinds>(args);
}
// Layers whose shards have K = 4, or K = 4 and, second, 3.
extern "C" void multiply(const PrefillArgs* args, u32 grid, u32 threads, u32 shared) {
    launch(grid, 1, threads, shared, [=] {
        if (args->shards[0].kind == 0) multiply_kinds<PrefillKinds<PrefillKind<8, 2>>>(*args);
        else multiply_kinds<PrefillKinds<PrefillKind<6, 2>, PrefillKind<8, 2>>>(*args);
    });
}
extern "C" void finish(const PrefillArgs* args, u32 tiles, u32 groups) {
    launch(tiles, groups, PAIR_THREADS, STAGING_BYTES, [=] { exl3_prefill_finish(*args); });
}

// The MoE kernels on the host, behind one function for ctypes.
#include "ptx.h"
#include "base/fragments.cuh"
#include "base/barrier.cuh"
#include "moe/group_hidden.cuh"
#include "moe/route.cuh"
#define INSTANCE_CLUSTER 1  // the host knows no larger ones
#include "moe/cluster.cuh"

#define INSTANCE_STAGE 0
#define exl3_moe_group_rows group_rows_0
#include "moe/group_rows.cu"
#undef INSTANCE_STAGE
#undef exl3_moe_group_rows
#define INSTANCE_STAGE 1
#define exl3_moe_group_rows group_rows_1
#include "moe/group_rows.cu"
#undef INSTANCE_STAGE
#undef exl3_moe_group_rows
#define INSTANCE_STAGE 2
#define exl3_moe_group_rows group_rows_2
#include "moe/group_rows.cu"
#include "moe/combine.cu"
#include "moe/combine_rows.cu"
#include "moe/route.cu"
#include "moe/rows.cu"
#include "moe/schedule.cu"

#define INSTANCE_WARPS 8
#include "moe/gemm.cuh"

using One = Kind<8, 2, 2, 16>;
// Units of a slot as vllm_exl3/cuda/moe_gemm.py chooses them.
template <int ROWS, bool MIXED>
void wide(const MoeArgs& args) {
    if constexpr (MIXED) moe_wide<ROWS == 32 ? 2 : 1, ROWS, 16, 16, WideKinds<One, Kind<6, 1, 2, 16>, Kind<5, 2, 2, 16>>>(args);
    else moe_wide<ROWS == 32 ? 2 : 1, ROWS, 16, 16, WideKinds<One>>(args);
}
// Widths as for layers of one kind, and of more than three.
template <int ROWS, bool MIXED>
void cluster(const MoeArgs& args) {
    constexpr int LEAST = MIXED && ROWS == 256 ? 144 : 64, STEP = MIXED && ROWS == 256 ? 112 : 32;
    if constexpr (MIXED) moe_cluster<ROWS, LEAST, STEP, WideKinds<One, Kind<6, 1, 2, 16>, Kind<5, 2, 2, 16>>>(args);
    else moe_cluster<ROWS, LEAST, STEP, WideKinds<One>>(args);
}
template <bool MIXED>
void narrow(const MoeArgs& args) {
    if constexpr (MIXED) moe_gemm<4, MoeKinds<Kind<8, 2, 0, 4>, Kind<6, 1, 1, 4>, Kind<5, 2, 0, 4>>>(args);
    else moe_gemm<4, MoeKinds<Kind<8, 2, 0, 4>>>(args);
}

// `kernel` as moe_host.py numbers them.
extern "C" void run_kernel(const MoeArgs* args, int kernel, int mixed, u32 grid_x, u32 grid_y, u32 block, u32 shared) {
    using Function = void (*)(const MoeArgs);
    const Function simple[] = {exl3_moe_route, exl3_moe_rows, group_rows_0, group_rows_1, exl3_moe_combine, exl3_moe_combine_rows, exl3_moe_count};
    waits_in_order = true;
    launch(grid_x, grid_y, block, shared, [=] {
        waited[running] = false;
        if (kernel < 7) simple[kernel](*args);
        else if (kernel == 7) mixed ? narrow<true>(*args) : narrow<false>(*args);
        else if (kernel == 8) mixed ? wide<32, true>(*args) : wide<32, false>(*args);
        else if (kernel == 9) mixed ? wide<64, true>(*args) : wide<64, false>(*args);
        else if (kernel == 10) mixed ? cluster<256, true>(*args) : cluster<256, false>(*args);
        else if (kernel == 11) mixed ? cluster<128, true>(*args) : cluster<128, false>(*args);
        else if (kernel == 12) exl3_moe_schedule(*args);
        else group_rows_2(*args);
        // Launches read ahead what the one before last wrote (moe/launch.cuh).
        if (!waited[running]) stop("a thread ended without waiting for the launch before");
    });
}

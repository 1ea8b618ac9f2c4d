// mbarriers, bulk copies and clusters of sm_90 and later.
#pragma once
#include "base/types.cuh"

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same barrier of another block of the cluster.
__device__ __forceinline__ void mbarrier_arrive_remote(u32 barrier, u32 rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(barrier), "r"(rank) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 phase) {
    asm volatile(
        "{\n"
        ".reg .pred arrived;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 arrived, [%0], %1;\n"
        "@!arrived bra again;\n"
        "}\n" ::"r"(barrier), "r"(phase) : "memory");
}

// The same where what came was stored by other blocks of the cluster.
__device__ __forceinline__ void mbarrier_wait_cluster(u32 barrier, u32 phase) {
    asm volatile(
        "{\n"
        ".reg .pred arrived;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 arrived, [%0], %1;\n"
        "@!arrived bra again;\n"
        "}\n" ::"r"(barrier), "r"(phase) : "memory");
}

// One lane of the warp, in the form that lets the compiler issue bulk copies without looping over lanes.
__device__ __forceinline__ bool elect_one() {
    u32 elected;
    asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}\n" : "=r"(elected));
    return elected != 0;
}
__device__ __forceinline__ void bulk_copy(u32 target, const u8* source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(target), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}
// To the same place of every block in `blocks` (a bit each), completing on the barrier of each.
__device__ __forceinline__ void bulk_copy_multicast(u32 target, const u8* source, u32 bytes, u32 barrier, u16 blocks) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 ::"r"(target), "l"(source), "r"(bytes), "r"(barrier), "h"(blocks) : "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// The two halves of the cluster's barrier. Relaxed, it says that every block has started and, behind `fence_barrier_init`, that its
// mbarriers are initialised; it makes nothing else visible that was written before it.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address of the same place in another block of the cluster.
__device__ __forceinline__ u32 map_to_rank(u32 address, u32 rank) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}
// The larger of two values goes to another block's shared memory, and counts as four bytes at its barrier.
__device__ __forceinline__ void max_remote(u32 address, u32 value, u32 barrier) {
    asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.max.u32 [%0], %1, [%2];"
                 ::"r"(address), "r"(value), "r"(barrier) : "memory");
}
// The same for a value that takes the place of what is there.
__device__ __forceinline__ void store_remote_async(u32 address, float value, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                 ::"r"(address), "r"(__float_as_uint(value)), "r"(barrier) : "memory");
}
__device__ __forceinline__ void store_remote(u32 address, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void named_barrier_sync(u32 barrier, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

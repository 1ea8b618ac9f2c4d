// mbarriers, bulk copies and named barriers on the host: a copy happens at once, and its bytes arrive.
#pragma once
#include <map>

#include "base/types.cuh"

struct HostBarrier {
    int expected = 0, arrived = 0;
    long bytes = 0;
    u32 phase = 0;
    void check() {
        if (arrived > expected) stop("a barrier has more arrivals than it expects");
        if (arrived == expected && bytes == 0) arrived = 0, phase ^= 1;
    }
};
inline thread_local std::map<u32, HostBarrier> host_barriers;

inline void mbarrier_init(u32 barrier, u32 count) { host_barriers[barrier] = {int(count)}; }
inline void fence_barrier_init() {}
inline void mbarrier_arrive(u32 barrier) { ++host_barriers[barrier].arrived, host_barriers[barrier].check(); }
inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) { host_barriers[barrier].bytes += bytes, mbarrier_arrive(barrier); }
inline void mbarrier_wait(u32 barrier, u32 phase) { while (host_barriers[barrier].phase == phase) switch_thread(); }
inline void mbarrier_wait_cluster(u32 barrier, u32 phase) { mbarrier_wait(barrier, phase); }
inline bool elect_one() { return collect(0, [](auto&, int lane) { return lane == 7; }); }
inline void bulk_copy(u32 target, const u8* source, u32 bytes, u32 barrier) {
    if (target % 16 || reinterpret_cast<uintptr_t>(source) % 16 || bytes % 16) stop("a bulk copy that is not of whole 16 bytes");
    memcpy(shared_bytes(target, bytes), source, bytes);
    host_barriers[barrier].bytes -= bytes, host_barriers[barrier].check();
}
inline void named_barrier_sync(u32 barrier, u32 count) { named_meetings[barrier].wait(count); }

// Clusters of one block.
inline u32 cluster_rank() { return 0; }
inline void cluster_sync() { __syncthreads(); }
inline void cluster_arrive_relaxed() {}
inline void cluster_arrive() {}
inline void cluster_wait() {}
inline u32 map_to_rank(u32 address, u32) { return address; }
inline void store_remote(u32 address, float value) { memcpy(shared_bytes(address, 4), &value, 4); }
inline void mbarrier_arrive_remote(u32 barrier, u32) { mbarrier_arrive(barrier); }
inline void bulk_copy_multicast(u32 target, const u8* source, u32 bytes, u32 barrier, u16) { bulk_copy(target, source, bytes, barrier); }

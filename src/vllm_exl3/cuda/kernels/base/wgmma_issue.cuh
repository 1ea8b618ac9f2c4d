// One product in flight: issues it and waits for the one before it.
#pragma once
#include "base/wgmma.cuh"

// A is complete before the product, whose decoding the compiler would move behind the fence else (ptxas adds waits then, C7519); `words`
// are decoded after it. `b`: B's descriptor.
template <class Mma, class Sum, int SUMS, int WORDS>
__device__ __forceinline__ void issue_product(Sum (&sums)[SUMS], u32 (&a)[4], u64 b, u32 (&words)[WORDS]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
    warpgroup_fence();
    Mma::run(sums, a, b);
    warpgroup_commit();
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
#pragma unroll
    for (int i = 0; i < WORDS; ++i) asm volatile("" : "+r"(words[i]));
}

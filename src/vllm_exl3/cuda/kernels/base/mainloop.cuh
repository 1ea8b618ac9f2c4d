// The main loop of the GEMMs whose A operand is decoded in registers: one product in flight while the weights of the next are decoded.
//
// It is made of three parts. Decoder: `words` of a lane's weights of a k block, PRODUCTS products a k block, and decode<I>, which makes the A
// operand of product I. Mma: the product (base/wgmma.cuh). Stages: the pipeline as a consumer sees it, of K_BLOCKS k blocks a stage:
//   count()               stages of the work tile, at least one;
//   wait(), advance()     for the next stage; the one behind it becomes the next;
//   k_block(i), load()    the address of k block i of the next stage; a lane's words from there;
//   operand()             the place of B in the next stage, operand_step() further for its next k block;
//   descriptor(b, i)      the descriptor of B there, for product i;
//   empty(), release()    the barrier that releases the next stage; this warp has read the stage of that barrier.
#pragma once
#include "base/wgmma.cuh"

// Issues a product and waits for the one before it. A is complete before the product, whose decoding the compiler would move behind the fence
// else (ptxas adds waits then, C7519); `words` are decoded after it. `b`: B's descriptor.
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

// sums += the products of all stages of a work tile. Behind the last, words of a stage that has undefined contents are read and decoded, and
// nobody uses them.
template <class Decoder, class Mma, class Sum, int SUMS, class Stages>
__device__ __forceinline__ void multiply_stages(Sum (&sums)[SUMS], const Stages& stages) {
    static_assert(Decoder::PRODUCTS == 2 || Decoder::PRODUCTS == 4, "of a k block of int8 or of fp16");
    u32 even[4], odd[4], words[Decoder::words];
    stages.wait();
    stages.load(words, stages.k_block(0));
    Decoder::template decode<0>(even, words);
    u32 before = 0;  // the empty barrier of the stage before, whose last product is still in flight
    for (u32 left = stages.count(); left != 0; --left) {
        auto b = stages.operand();
#pragma unroll
        for (int k_block = 0; k_block < Stages::K_BLOCKS; ++k_block) {
            issue_product<Mma>(sums, even, Stages::descriptor(b, 0), words);
            if (k_block == 0 && before) stages.release(before);
            Decoder::template decode<1>(odd, words);
            if constexpr (Decoder::PRODUCTS == 4) {
                issue_product<Mma>(sums, odd, Stages::descriptor(b, 1), words);
                Decoder::template decode<2>(even, words);
                issue_product<Mma>(sums, even, Stages::descriptor(b, 2), words);
                Decoder::template decode<3>(odd, words);
            }
            u32 next = stages.k_block(k_block + 1);
            if (k_block == Stages::K_BLOCKS - 1) {
                before = stages.empty();
                stages.advance();
                if (left > 1) stages.wait();
                next = stages.k_block(0);
            }
            stages.load(words, next);
            issue_product<Mma>(sums, odd, Stages::descriptor(b, Decoder::PRODUCTS - 1), words);
            Decoder::template decode<0>(even, words);
            b += stages.operand_step();
        }
    }
    warpgroup_wait();
    stages.release(before);
}

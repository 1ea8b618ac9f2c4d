// Runs a kernel's thread blocks on the host, one after the other or all at once, each in a thread of the host's: a block's threads
// are coroutines, and warp and block collectives are meeting points that switch to the next one. Enough of CUDA for this package's
// kernels; slow, and exact about barriers: threads that wait for each other for ever stop the launch, and host_failure says why.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <type_traits>
#include <vector>

#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define SHARED_TYPE(T) T
#define __align__(size) __attribute__((aligned(size)))
#define __CUDA_ARCH__ 900

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

constexpr int SHARED_BYTES = 1 << 18, STACK_BYTES = 1 << 17, MAX_THREADS = 1024;
constexpr unsigned SHARED_BASE = 1024;  // shared addresses begin there, so that 0 is none
alignas(1024) inline thread_local unsigned char memory[SHARED_BYTES];
inline thread_local unsigned shared_limit = SHARED_BYTES;  // of the launch: accesses beyond it stop it

// What went wrong first in this library; it runs nothing after that, since threads that were given up left their copies behind.
inline std::atomic<const char*> failure{nullptr};
extern "C" const char* host_failure() { return failure; }
inline void fail(const char* why) {
    const char* none = nullptr;
    failure.compare_exchange_strong(none, why);
}
struct Stopped {};
// Ends a kernel's thread, and with it the launch.
[[noreturn]] inline void stop(const char* why) {
    fail(why);
    throw Stopped{};
}
inline unsigned char* shared_bytes(unsigned address, unsigned size) {
    if (address < SHARED_BASE || address - SHARED_BASE + size > shared_limit || address % std::min(size, 16u)) stop("shared memory access");
    return memory + address - SHARED_BASE;
}

struct Thread { ucontext_t context; bool done; };
inline thread_local Thread threads[MAX_THREADS];
inline thread_local ucontext_t scheduler;
inline thread_local int running;
inline thread_local unsigned block_x, block_y, threads_a_block, blocks_x, blocks_y;
struct Index { unsigned x; };
#define threadIdx (Index{static_cast<unsigned>(running)})
#define blockIdx (Index2{block_x, block_y})
#define blockDim (Index{threads_a_block})
#define gridDim (Index2{blocks_x, blocks_y})
struct Index2 { unsigned x, y; };

inline void switch_thread() { const int mine = running; swapcontext(&threads[mine].context, &scheduler); }

struct Meeting {
    unsigned arrived = 0, round = 0;
    void wait(unsigned count) {
        const unsigned mine = round;
        if (++arrived == count) arrived = 0, ++round;
        else while (round == mine) switch_thread();
    }
};
inline thread_local Meeting block_meeting, warp_meetings[MAX_THREADS / 32], named_meetings[16];
inline thread_local unsigned warp_values[MAX_THREADS / 32][32];

inline void __syncthreads() { block_meeting.wait(threads_a_block); }
inline void __syncwarp() { warp_meetings[running / 32].wait(32); }

// Every lane's value to a function of all of them.
template <class F>
inline auto collect(unsigned value, const F& function) {
    unsigned(&values)[32] = warp_values[running / 32];
    values[running % 32] = value;
    __syncwarp();
    const auto result = function(values, running % 32);
    __syncwarp();
    return result;
}
inline unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
inline float __expf(float v) { return expf(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }

inline unsigned __shfl_sync(unsigned, unsigned v, unsigned lane) { return collect(v, [=](auto& all, int) { return all[lane & 31]; }); }
inline unsigned __shfl_xor_sync(unsigned, unsigned v, unsigned mask) { return collect(v, [=](auto& all, int lane) { return all[lane ^ mask]; }); }
inline float __shfl_xor_sync(unsigned all, float v, unsigned mask) { return __uint_as_float(__shfl_xor_sync(all, __float_as_uint(v), mask)); }
inline int __shfl_xor_sync(unsigned all, int v, unsigned mask) { return int(__shfl_xor_sync(all, unsigned(v), mask)); }
inline unsigned __shfl_up_sync(unsigned, unsigned v, unsigned by) {
    return collect(v, [=](auto& all, int lane) { return lane >= int(by) ? all[lane - by] : all[lane]; });
}
inline unsigned __match_any_sync(unsigned, int v) {
    return collect(v, [](auto& all, int lane) { unsigned same = 0; for (int i = 0; i < 32; ++i) same |= unsigned(all[i] == all[lane]) << i; return same; });
}
inline unsigned __reduce_max_sync(unsigned, unsigned v) { return collect(v, [](auto& all, int) { return *std::max_element(all, all + 32); }); }
inline int __reduce_add_sync(unsigned, int v) { return collect(v, [](auto& all, int) { unsigned sum = 0; for (unsigned one : all) sum += one; return int(sum); }); }

inline unsigned __ballot_sync(unsigned, int v) {
    return collect(unsigned(v != 0), [](auto& all, int) { unsigned bits = 0; for (int i = 0; i < 32; ++i) bits |= all[i] << i; return bits; });
}
inline int __any_sync(unsigned, int v) { return collect(v, [](auto& all, int) { return int(std::any_of(all, all + 32, [](unsigned one) { return one != 0; })); }); }
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(unsigned v) { return __builtin_ffs(v); }
inline unsigned atomicMax(unsigned* at, unsigned v) { const unsigned old = *at; *at = std::max(old, v); return old; }
inline unsigned atomicAdd(unsigned* at, unsigned v) { const unsigned old = *at; *at += v; return old; }
inline int atomicAdd(int* at, int v) { const int old = *at; *at += v; return old; }
inline int __float2int_rn(float v) { return int(std::nearbyintf(v)); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) { return by &= 31, by ? high << by | low >> (32 - by) : high; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) { return by &= 31, by ? low >> by | high << (32 - by) : low; }
inline int __dp4a(unsigned a, unsigned b, int c) { for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255); return c; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = uint64_t(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= (both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
template <class T> inline T __ldcg(const T* at) { return *at; }
template <class A, class B> inline auto max(A a, B b) { return std::max<std::common_type_t<A, B>>(a, b); }
template <class A, class B> inline auto min(A a, B b) { return std::min<std::common_type_t<A, B>>(a, b); }
inline unsigned long long __cvta_generic_to_shared(const void* pointer) { return static_cast<const unsigned char*>(pointer) - memory + SHARED_BASE; }

inline thread_local std::function<void()> kernel_body;
inline void run_thread() {
    try { kernel_body(); } catch (const Stopped&) {}
    threads[running].done = true;
}

// Runs one block; its shared memory is poisoned before. Blocks that run at once may wait long for one that the host does not run just
// now, which is given its turn; alone, a block's threads can only wait for each other.
inline void run_block(bool at_once) {
    const auto begun = std::chrono::steady_clock::now();
    static thread_local std::vector<std::vector<char>> stacks(MAX_THREADS);
    memset(memory, 0xff, sizeof memory);
    block_meeting = {};
    for (Meeting& meeting : warp_meetings) meeting = {};
    for (Meeting& meeting : named_meetings) meeting = {};
    for (unsigned i = 0; i < threads_a_block; ++i) {
        stacks[i].resize(STACK_BYTES);
        threads[i].done = false;
        getcontext(&threads[i].context);
        threads[i].context.uc_stack.ss_sp = stacks[i].data(), threads[i].context.uc_stack.ss_size = STACK_BYTES;
        threads[i].context.uc_link = &scheduler;
        makecontext(&threads[i].context, run_thread, 0);
    }
    unsigned left = threads_a_block;
    for (long round = 0; left && !failure; ++round) {
        if (at_once) std::this_thread::yield();
        const bool too_long = at_once ? std::chrono::steady_clock::now() - begun > std::chrono::minutes(5) : round == 2000000;
        if (too_long) fail("threads wait for each other");
        left = 0;
        for (unsigned i = 0; i < threads_a_block && !failure; ++i)
            if (!threads[i].done) {
                running = i;
                swapcontext(&scheduler, &threads[i].context);
                left += !threads[i].done;
            }
    }
}

// Runs a grid, one block after the other.
inline void launch(unsigned grid_x, unsigned grid_y, unsigned block, unsigned shared, std::function<void()> body) {
    kernel_body = std::move(body), threads_a_block = block, blocks_x = grid_x, blocks_y = grid_y, shared_limit = shared;
    for (block_y = 0; block_y < grid_y; ++block_y)
        for (block_x = 0; block_x < grid_x && !failure; ++block_x) run_block(false);
}

// Runs a grid, all blocks at once.
inline void launch_at_once(unsigned grid_x, unsigned grid_y, unsigned block, unsigned shared, std::function<void()> body) {
    std::vector<std::thread> blocks;
    for (unsigned y = 0; y < grid_y; ++y)
        for (unsigned x = 0; x < grid_x; ++x)
            blocks.emplace_back([=] {
                kernel_body = body, threads_a_block = block, blocks_x = grid_x, blocks_y = grid_y, shared_limit = shared;
                block_x = x, block_y = y;
                run_block(true);
            });
    for (std::thread& one : blocks) one.join();
}

// Runs the input kernels and the end of tiles of the prefill kernels on the host: threads are coroutines that change at
// barriers and shuffles. Products are replaced by plain sums over the same operands in the same layouts.
//
// Reads from stdin: the sizes (see main), then x, suh, svh as fp16 bits, bias and a dense W [in][out] as float. Writes out.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <type_traits>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
struct Dim { unsigned x, y, z; };
static Dim threadIdx, blockIdx, blockDim, gridDim;
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class A, class B> auto min(A a, B b) { using T = std::common_type_t<A, B>; return T(a) < T(b) ? T(a) : T(b); }
template <class A, class B> auto max(A a, B b) { using T = std::common_type_t<A, B>; return T(a) > T(b) ? T(a) : T(b); }
template <class To, class From> To bits_as(From from) { To to; memcpy(&to, &from, sizeof to); return to; }
static float __uint_as_float(unsigned v) { return bits_as<float>(v); }
static unsigned __float_as_uint(float v) { return bits_as<unsigned>(v); }
static char* shared_base;
static size_t __cvta_generic_to_shared(const void* p) { return static_cast<const char*>(p) - shared_base; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> void __stcg(T* p, T v) { *p = v; }
template <class T> void __stcs(T* p, T v) { *p = v; }
static void __threadfence() {}
template <class T> T atomicAdd(T* p, T v) { T old = *p; *p += v; return old; }
template <class T> T atomicMax(T* p, T v) { T old = *p; *p = max(*p, v); return old; }
static unsigned short half_bits(float v) { return bits_as<unsigned short>(static_cast<_Float16>(v)); }
static float half_value(unsigned short v) { return float(bits_as<_Float16>(v)); }

// A block's threads.
static std::vector<ucontext_t> fibers;
static std::vector<std::vector<char>> stacks;
static std::vector<bool> done;
static ucontext_t scheduler;
static std::function<void()> body;
static void enter() {
    body();
    done[threadIdx.x] = true;
    swapcontext(&fibers[threadIdx.x], &scheduler);
}
static void yield() {
    const unsigned me = threadIdx.x;
    swapcontext(&fibers[me], &scheduler);
}
struct Barrier {
    unsigned count = 0, generation = 0;
    void wait(unsigned threads) {
        const unsigned mine = generation;
        if (++count == threads) count = 0, ++generation;
        while (generation == mine) yield();
    }
};
static Barrier block_barrier, warp_barriers[32];
static unsigned exchanged[1024], block_threads;
static void run_block(unsigned threads, std::function<void()> f) {
    body = f, block_threads = threads;
    fibers.resize(threads), stacks.resize(threads), done.assign(threads, false);
    for (unsigned i = 0; i < threads; ++i) {
        stacks[i].resize(1 << 17);
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = stacks[i].data(), fibers[i].uc_stack.ss_size = stacks[i].size(), fibers[i].uc_link = nullptr;
        makecontext(&fibers[i], enter, 0);
    }
    for (unsigned left = threads; left;) {
        left = 0;
        for (unsigned i = 0; i < threads; ++i)
            if (!done[i]) threadIdx.x = i, swapcontext(&scheduler, &fibers[i]), left += !done[i];
    }
}
static void __syncthreads() { block_barrier.wait(block_threads); }
static void __syncwarp() { warp_barriers[threadIdx.x / 32].wait(32); }
template <class T> T __shfl_xor_sync(unsigned, T v, int mask) {
    exchanged[threadIdx.x] = bits_as<unsigned>(v);
    __syncwarp();
    const T other = bits_as<T>(exchanged[threadIdx.x ^ mask]);
    __syncwarp();
    return other;
}
template <class T> T __shfl_sync(unsigned, T v, int) { return v; }  // used by kernels that are not run here
static unsigned __reduce_max_sync(unsigned, unsigned v) {
    for (int step = 1; step < 32; step *= 2) v = max(v, __shfl_xor_sync(0, v, step));
    return v;
}
static unsigned __byte_perm(unsigned, unsigned, unsigned) { abort(); }
static unsigned __dp4a(unsigned, unsigned, unsigned) { abort(); }
static unsigned __funnelshift_l(unsigned, unsigned, unsigned) { abort(); }
static unsigned __funnelshift_r(unsigned, unsigned, unsigned) { abort(); }

static unsigned char* rows;  // the transform's dynamic shared memory
#include "transform.h"
static unsigned char* memory;  // the finishing kernel's shared memory
#include "finish.h"

struct HostBlock {
    const PrefillArgs& args;
    Staging& staging;
    u32 place;
    int warp, lane, thread;
    void sync() const { block_barrier.wait(256); }
};

template <class T> std::vector<T> read(size_t count) {
    std::vector<T> v(count + 64);
    if (fread(v.data(), sizeof(T), count, stdin) != count) abort();
    v.resize(count);
    return v;
}

template <int TOKENS, int PAIRS, int CLUSTER>
void run_tiles(const PrefillArgs& args, unsigned clusters, const std::vector<float>& dense, u32 outputs, unsigned seed) {
    using S = Shape<TOKENS, PAIRS, CLUSTER>;
    alignas(16) static char staged[STAGING_BYTES];
    Staging& staging = *reinterpret_cast<Staging*>(staged);
    shared_base = staged;
    std::vector<unsigned> order(clusters);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    for (unsigned cluster : order)
        for (unsigned place = 0; place < S::N_BLOCKS; ++place) {
            PrefillScheduler scheduler(args, cluster, clusters);
            PrefillWorkTile work;
            while (scheduler.next(args, work)) {
                u32 column = 0;  // of W: the shards' stored columns lie side by side
                for (u32 s = 0; s < work.shard; ++s) column += args.shards[s].out_features;
                const u32 n_block = S::N_BLOCKS * work.n_tile + place, depth = args.in_features / BLOCK_K;
                const bool exists = n_block < args.shards[work.shard].out_features / HADAMARD_SIZE;
                column += n_block * HADAMARD_SIZE;
                std::vector<float> tile(TOKENS * HADAMARD_SIZE);  // [token][channel]
                for (u32 k_block = work.begin; exists && k_block < work.end; ++k_block) {
                    const u8* at = args.activations + (size_t(work.shard * args.row_tiles + work.row_tile) * depth + k_block) * TOKENS * 128;
                    for (u32 token = 0; token < TOKENS; ++token)
                        for (u32 matrix = 0; matrix < 8; ++matrix)
                            for (u32 q = 0; q < 4; ++q)
                                for (u32 half = 0; half < 2; ++half) {
                                    unsigned short bits;
                                    memcpy(&bits, at + (matrix * TOKENS + token) * 16 + 4 * q + 2 * half, 2);
                                    const u32 k = 64 * k_block + 16 * q + 2 * (matrix >> 1) + 8 * (matrix & 1) + half;
                                    const float a = half_value(bits);
                                    if (a == 0 || std::isnan(a)) continue;
                                    const float* w = dense.data() + size_t(k) * outputs + column;
                                    for (u32 c = 0; c < HADAMARD_SIZE; ++c) tile[token * HADAMARD_SIZE + c] += a * w[c];
                                }
                }
                blockIdx.x = cluster * CLUSTER + place / PAIRS;
                run_block(256, [&] {
                    HostBlock block{args, staging, place, int(threadIdx.x / 32), int(threadIdx.x % 32), int(threadIdx.x)};
                    float sums[TOKENS / 2];
                    for (int j = 0; j < TOKENS / 8; ++j)
                        for (int i = 0; i < 4; ++i) {
                            const u32 token = 8 * j + 2 * (block.lane & 3) + (i & 1), channel = 16 * block.warp + (block.lane >> 2) + 8 * (i >> 1);
                            sums[4 * j + i] = tile[token * HADAMARD_SIZE + channel];
                        }
                    fetch_scales<S>(block, work);
                    finish_tile<S>(sums, block, work);
                });
            }
        }
}

int main() {
    // Sizes: PrefillArgs without pointers (as the plan makes it), then tokens, clusters, seed, the transform's blocks, threads and shared memory,
    // and the finishing kernel's grid.
    PrefillArgs args = read<PrefillArgs>(1)[0];
    const auto more = read<u32>(8);
    u32 outputs = 0, columns = 0;
    for (u32 s = 0; s < args.shard_count; ++s) outputs += args.shards[s].out_features, columns += args.shards[s].crop_size;
    auto x = read<u16>(size_t(args.rows) * args.in_width);
    auto suh = read<u16>(size_t(args.shard_count) * args.in_features);
    auto svh = read<u16>(outputs);
    auto bias = read<float>(columns);
    auto dense = read<float>(size_t(args.in_features) * outputs);
    std::vector<float> out(size_t(args.rows) * columns, NAN), scales(args.shard_count * args.rows, NAN);
    std::vector<uint4> activations(size_t(args.shard_count) * args.row_tiles * args.tile_rows * args.in_features / 8 + 1);
    memset(activations.data(), 0xff, activations.size() * 16);
    std::vector<uint4> partials(size_t(4) * (args.ranges + 1) * args.tile_rows * 16, uint4{~0u, ~0u, ~0u, ~0u});
    // Vectors of u16 and float from malloc are 16-byte aligned, as device tensors are.
    args.x = x.data(), args.x_stride = args.in_width, args.x_type = F16, args.out = out.data(), args.out_stride = columns, args.out_type = F32;
    args.bias = bias.data(), args.bias_type = F32, args.activations = reinterpret_cast<u8*>(activations.data());
    std::vector<u32> arrivals(size_t(args.n_tiles) * args.row_tiles * args.n_blocks);  // cleared by the transform, and for the GEMM's own end of tiles
    args.scales = scales.data(), args.partials = partials.data(), args.arrivals = arrivals.data();
    for (u32 s = 0, column = 0; s < args.shard_count; column += args.shards[s++].out_features)
        args.shards[s].suh = suh.data() + size_t(s) * args.in_features, args.shards[s].svh = svh.data() + column;
    std::vector<uint4> held_memory(more[5] / 16 + 1);
    rows = reinterpret_cast<u8*>(held_memory.data()), shared_base = reinterpret_cast<char*>(rows);
    gridDim = {more[3], 1, 1}, blockDim = {more[4], 1, 1};
    for (blockIdx.x = 0; blockIdx.x < more[3]; ++blockIdx.x) run_block(more[4], [&] { exl3_prefill_transform(args); });
    if (more[0] == 64) run_tiles<64, 2, 1>(args, more[1], dense, outputs, more[2]);
    else if (more[0] == 256) run_tiles<256, 1, 2>(args, more[1], dense, outputs, more[2]);
    else abort();
    std::vector<uint4> staged(STAGING_BYTES / 16 + 1);
    memory = reinterpret_cast<u8*>(staged.data()), shared_base = reinterpret_cast<char*>(memory);
    for (blockIdx.y = 0; blockIdx.y < more[7]; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < more[6]; ++blockIdx.x) run_block(PAIR_THREADS, [&] { exl3_prefill_finish(args); });
    fwrite(out.data(), 4, out.size(), stdout);
}

// prefill/rotate.cu on the host: the blocks of a cluster are one block of the emulator, each with shared memory of its own.
#include "ptx.h"
#include "base/barrier.cuh"

#define ROTATE_WARPS 2  // few, so that clusters of 8 fit
#define ROTATE_BLOCKS 1
constexpr unsigned BLOCK_THREADS = 32 * ROTATE_WARPS, BLOCK_BYTES = 256 + 128 + 2048 + ROTATE_WARPS * 2 * 2048;
static unsigned cluster_size;  // blocks of a cluster
static unsigned rank_of_thread() { return running / BLOCK_THREADS; }

static Meeting block_meetings[8];
static void meet_block() { block_meetings[rank_of_thread()].wait(BLOCK_THREADS); }
// A cluster's barrier in two halves.
static unsigned arrivals, cluster_round, rounds[MAX_THREADS];
static void arrive_at_cluster() {
    rounds[running] = cluster_round;
    if (++arrivals == threads_a_block) arrivals = 0, ++cluster_round;
}
static void wait_for_arrivals() { while (cluster_round == rounds[running]) switch_thread(); }
static unsigned char* block_memory() { return memory + rank_of_thread() * BLOCK_BYTES; }

#undef threadIdx
#undef blockIdx
#define threadIdx (Index{unsigned(running) % BLOCK_THREADS})
#define blockIdx (Index2{block_x * cluster_size + rank_of_thread(), block_y})
#define __syncthreads meet_block
#define cluster_arrive arrive_at_cluster
#define cluster_wait wait_for_arrivals


inline unsigned address_in(unsigned address, unsigned rank) { return address + (rank - rank_of_thread()) * BLOCK_BYTES; }
inline void meet_cluster() { arrive_at_cluster(), wait_for_arrivals(); }
#define map_to_rank address_in
#define cluster_sync meet_cluster
inline void max_remote(unsigned at, unsigned value, unsigned barrier) {
    unsigned* to = reinterpret_cast<unsigned*>(shared_bytes(at, 4));
    *to = std::max(*to, value);
    host_barriers[barrier].bytes -= 4, host_barriers[barrier].check();
}

inline unsigned larger_magnitude(unsigned a, unsigned b, unsigned infinity) {
    a &= 0x7fff, b &= 0x7fff;
    return a > infinity || b > infinity ? 0x7fff : std::max(a, b);
}
inline void ptx_max_NaN_xorsign_abs_f16x2(unsigned& d, unsigned a, unsigned b) {
    d = larger_magnitude(a, b, 0x7c00) | larger_magnitude(a >> 16, b >> 16, 0x7c00) << 16 | ((a ^ b) & 0x80008000);
}
inline void ptx_max_NaN_xorsign_abs_bf16x2(unsigned& d, unsigned a, unsigned b) {
    d = larger_magnitude(a, b, 0x7f80) | larger_magnitude(a >> 16, b >> 16, 0x7f80) << 16 | ((a ^ b) & 0x80008000);
}
inline void ptx_cvt_rn_f16x2_f32(u32& word, float high, float low) { word = half_bits_of(high) << 16 | half_bits_of(low); }

#define memory block_memory()  // the kernel's
#include "prefill/rotate.cu"
#undef memory

extern "C" void rotate(const PrefillArgs* args) {
    cluster_size = args->cluster_size;
    launch((args->rows + ROWS - 1) / ROWS, args->shard_count, cluster_size * BLOCK_THREADS, cluster_size * BLOCK_BYTES, [=] { exl3_prefill_rotate(*args); });
}

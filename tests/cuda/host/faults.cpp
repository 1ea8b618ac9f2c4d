// What can go wrong in a kernel on the host, a function each.
#include "ptx.h"

extern "C" void run_well(unsigned* out) {
    launch(1, 1, 64, 0, [=] { __syncthreads(), out[threadIdx.x] = threadIdx.x; });
}
extern "C" void read_beyond_shared_memory(int at_once) {
    (at_once ? launch_at_once : launch)(2, 1, 32, 64, [] {
        unsigned word;
        if (blockIdx.x == 1) ptx_ld_shared_u32(word, SHARED_BASE + 4 * threadIdx.x);
    });
}
extern "C" void leave_a_barrier_out(int at_once) {
    (at_once ? launch_at_once : launch)(2, 1, 2, 0, [=] {
        if (at_once && threadIdx.x == 0) stop("a thread that others wait for");
        if (threadIdx.x != 0) __syncthreads();
    });
}
extern "C" void wait_in_order() { waits_in_order = true; }
extern "C" void begin_the_next_launch_before_waiting() {
    launch(1, 1, 32, 0, [] { ptx_griddepcontrol_launch_dependents(), ptx_griddepcontrol_wait(); });
}

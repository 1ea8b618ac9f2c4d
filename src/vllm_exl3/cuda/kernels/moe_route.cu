// Sorts the slots by expert, where the input transform needs the order.
#include "moe_route.cuh"

extern "C" __global__ void __launch_bounds__(1024) exl3_moe_route(const __grid_constant__ MoeArgs args) {
    extern __shared__ __align__(16) u32 memory[];
    wait_for_previous();
    let_next_start();
    route(args, memory);
}

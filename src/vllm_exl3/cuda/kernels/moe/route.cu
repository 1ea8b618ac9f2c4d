// Sorts slots by expert, where rows are grouped: exl3_moe_count where several blocks share the work, then exl3_moe_route. Its
// blocks in y beyond the first find largest values in the meantime.
#include "moe/route.cuh"

extern "C" __global__ void __launch_bounds__(1024) exl3_moe_count(const __grid_constant__ MoeArgs args) {
    extern __shared__ __align__(16) u32 memory[];
    wait_on_dependent_grids();
    launch_dependent_grids();
    count_experts(args, memory);
}
extern "C" __global__ void __launch_bounds__(1024) exl3_moe_route(const __grid_constant__ MoeArgs args) {
    extern __shared__ __align__(16) u32 memory[];
    wait_on_dependent_grids();
    launch_dependent_grids();
    if (blockIdx.y == 0) route(args, memory, blockIdx.x, gridDim.x);
    else find_largest(args, (blockIdx.y - 1) * gridDim.x + blockIdx.x, (gridDim.y - 1) * gridDim.x);
}

// The input transform of every slot's rows where they lie by slot, grid (slots, projections); one more block in x sorts the
// slots in the meantime.
#include "moe/route_few.cuh"
#include "moe/rows.cuh"

extern "C" __global__ void __launch_bounds__(ROW_THREADS, 4) exl3_moe_rows(const __grid_constant__ MoeArgs args) {
    extern __shared__ __align__(16) u32 memory[];
    float* values = reinterpret_cast<float*>(memory + 4);
    if (args.stage == 0) begin_launch();
    if (blockIdx.x < args.slots) transform_row(args, blockIdx.x, blockIdx.y, values, memory);
    else if (blockIdx.y == 0) args.slots <= FEW_SLOTS ? route_few(args, memory) : route(args, memory, 0, 1);
}

// The input transforms where rows are grouped: of the first stage with INSTANCE_STAGE 0, of the second with 1. Blocks go round
// over chunks.
#include "moe_group_hidden.cuh"

extern "C" __global__ void __launch_bounds__(2 * GROUP_THREADS, 1) exl3_moe_group_rows(const __grid_constant__ MoeArgs args) {
    __shared__ u32 largest[CHUNK_ROWS];
    extern __shared__ __align__(16) u8 memory[];
    wait_for_previous();
    let_next_start();
    const MoeStage& stage = args.stages[INSTANCE_STAGE];
    float* totals = reinterpret_cast<float*>(memory);  // [projection][128-blocks][CHUNK_ROWS]
    const Signs signs(threadIdx.x & 31), out_signs = output_signs(threadIdx.x & 31);
    const bool fast = args.x_type != F32 && (args.x_stride | stage.in_width) % 8 == 0 && reinterpret_cast<u64>(args.x) % 16 == 0;
    for (u32 i = blockIdx.x; i < args.list_sizes[1]; i += gridDim.x) {
        const RowBlock chunk = args.chunks[i];
        if constexpr (INSTANCE_STAGE == 1)
            transform_hidden(args, stage, chunk, out_signs, signs, largest, totals, memory + stage.in_features / STRIP * CHUNK_ROWS * 4);
        else if (fast) transform_inputs<true>(args, stage, chunk, signs, totals);
        else transform_inputs<false>(args, stage, chunk, signs, totals);
    }
}

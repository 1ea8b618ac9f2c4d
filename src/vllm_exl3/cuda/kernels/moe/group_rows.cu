// The input transforms where rows are grouped: INSTANCE_STAGE 0 is the first stage's, 1 the second's, 2 the second's of experts
// with SwiGLU and without biases. Blocks go round over chunks.
#include "moe/group_swiglu.cuh"
#include "moe/group_inputs.cuh"

extern "C" __global__ void __launch_bounds__(RESIDENT_THREADS[INSTANCE_STAGE], 1) exl3_moe_group_rows(const __grid_constant__ MoeArgs args) {
    __shared__ u32 largest[CHUNK_ROWS];
    extern __shared__ __align__(16) u8 memory[];
    wait_on_dependent_grids();
    launch_dependent_grids();
    const MoeStage& stage = args.stages[INSTANCE_STAGE != 0];
    const Signs signs(threadIdx.x & 31);
    if constexpr (INSTANCE_STAGE == 0) {
        InputChunks& chunks = *reinterpret_cast<InputChunks*>(memory);
        float* totals = reinterpret_cast<float*>(memory + sizeof(InputChunks));
        const bool fast = args.x_type != F32 && (args.x_stride | stage.in_width) % 8 == 0 && reinterpret_cast<u64>(args.x) % 16 == 0;
        if (fast) transform_inputs(args, stage, signs, chunks, totals);
        else transform_any_inputs(args, stage, signs, chunks, totals);
    } else if constexpr (INSTANCE_STAGE == 2) {
        transform_swiglu(args, stage, memory);
    } else {
        float* totals = reinterpret_cast<float*>(memory);  // [128-blocks][CHUNK_ROWS]
        const Signs out_signs = output_signs(threadIdx.x & 31);
        for (u32 i = blockIdx.x; i < args.list_sizes[1]; i += gridDim.x)
            transform_hidden(args, stage, args.chunks[i], out_signs, signs, largest, totals, memory + stage.in_features / HADAMARD_SIZE * CHUNK_ROWS * 4);
    }
}

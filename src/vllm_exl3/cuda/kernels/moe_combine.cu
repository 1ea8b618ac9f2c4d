// out[token] = sum of its slots' rows times their routing weights, in float32, in the order of the choices.
#include "moe_problem.cuh"

constexpr int COMBINE_THREADS = 256;

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS) exl3_moe_combine(const __grid_constant__ MoeArgs args) {
    wait_for_previous();
    let_next_start();
    const MoeStage& down = args.stages[1];
    const u32 token = blockIdx.x, channel = 4 * (blockIdx.y * COMBINE_THREADS + threadIdx.x);
    if (channel >= down.out_width) return;
    float total[4] = {};
    for (u32 choice = 0; choice < args.top_k; ++choice) {
        const u32 slot = token * args.top_k + choice;
        if (expert_of(args, slot) < 0) continue;
        const float weight = args.weight_on_input ? 1.0f : args.weights[slot];
        const float4 row = stage_output(args, down, slot, 0, channel);
        total[0] += row.x * weight, total[1] += row.y * weight, total[2] += row.z * weight, total[3] += row.w * weight;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (channel + i < down.out_width) store_element(args.out, token * args.out_stride + channel + i, args.out_type, total[i]);
}

// out[token] = sum of its slots' rows times their routing weights, in float32, in the order of the choices; where rows lie by slot.
#include "moe_problem.cuh"

constexpr int COMBINE_THREADS = 256;
constexpr u32 AT_ONCE = 4;  // rows whose loads overlap

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS) exl3_moe_combine(const __grid_constant__ MoeArgs args) {
    wait_for_previous();
    let_next_start();
    const MoeStage& down = args.stages[1];
    const u32 token = blockIdx.x, channel = 4 * (blockIdx.y * COMBINE_THREADS + threadIdx.x);
    if (channel >= down.out_width) return;
    float total[4] = {};
    for (u32 first = 0; first < args.top_k; first += AT_ONCE) {
        float4 rows[AT_ONCE];
        float weights[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            const u32 slot = token * args.top_k + first + i;
            const bool counts = first + i < args.top_k && expert_of(args, slot) >= 0;
            rows[i] = counts ? stage_output(down, slot, 0, channel) : make_float4(0, 0, 0, 0);
            weights[i] = !counts ? 0.0f : args.weight_on_input ? 1.0f : args.weights[slot];
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i)
            total[0] += rows[i].x * weights[i], total[1] += rows[i].y * weights[i], total[2] += rows[i].z * weights[i],
                total[3] += rows[i].w * weights[i];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (channel + i < down.out_width) store_element(args.out, token * args.out_stride + channel + i, args.out_type, total[i]);
}

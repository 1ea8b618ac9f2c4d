// out[token] = sum of its slots' rows times their routing weights, in float32, in the order of the choices; where rows lie by slot.
#include "moe/launch.cuh"
#include "moe/arguments.cuh"

constexpr int COMBINE_THREADS = 256;
constexpr u32 AT_ONCE = 4;   // rows whose loads overlap
constexpr u32 CHOICES = 64;  // whose weights are read together

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS) exl3_moe_combine(const __grid_constant__ MoeArgs args) {
    __shared__ float weights[CHOICES];
    __shared__ u32 here[CHOICES];
    const MoeStage& down = args.stages[1];
    const u32 token = blockIdx.x, channel = 4 * (blockIdx.y * COMBINE_THREADS + threadIdx.x);
    float total[4] = {};
    for (u32 base = 0; base < args.top_k; base += CHOICES) {
        const u32 choices = min(args.top_k - base, CHOICES), slots = token * args.top_k + base;
        if (base != 0) __syncthreads();
        if (threadIdx.x < choices) {
            here[threadIdx.x] = expert_of(args, slots + threadIdx.x) >= 0;
            weights[threadIdx.x] = args.weight_on_input ? 1.0f : args.weights[slots + threadIdx.x];
        }
        if (base == 0) begin_launch();
        __syncthreads();
        if (channel >= down.out_width) continue;
        for (u32 first = 0; first < choices; first += AT_ONCE) {
            float4 rows[AT_ONCE];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i)
                rows[i] = first + i < choices && here[first + i] ? stage_output(down, slots + first + i, 0, channel) : make_float4(0, 0, 0, 0);
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i) {
                const float weight = first + i < choices && here[first + i] ? weights[first + i] : 0.0f;
                total[0] += rows[i].x * weight, total[1] += rows[i].y * weight, total[2] += rows[i].z * weight, total[3] += rows[i].w * weight;
            }
        }
    }
    if (channel >= down.out_width) return;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (channel + i < down.out_width) store_element(args.out, token * args.out_stride + channel + i, args.out_type, total[i]);
}

// out[token] = sum of its slots' rows times their routing weights, where rows are grouped: with their output Hadamard, svh and
// bias. A warp: 128 channels of two tokens, a token's choices in the rows of one half of the tensor cores' operand, eight at
// a time. The order of a sum follows from the choices' numbers.
#include "moe_outputs.cuh"

// A lane's choice of each of two tokens: its row in `order` or NOWHERE, its projection, routing weight, and that times what
// undoes the row's scale.
struct Pick {
    u32 rows[2];
    const Projection* projections[2];
    float weights[2], factors[2];

    // Choice `choice` of tokens 2·pair and 2·pair + 1.
    __device__ __forceinline__ void find(const MoeArgs& args, u32 pair, u32 choice) {
        const MoeStage& down = args.stages[1];
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            const u32 token = 2 * pair + r, slot = token * args.top_k + choice;
            const int expert = token < args.tokens && choice < args.top_k ? expert_of(args, slot) : -1;
            const bool counts = expert >= 0;
            rows[r] = counts ? args.places[slot] : NOWHERE;
            projections[r] = &projection_of(args, counts ? expert : 0, down.first);
            weights[r] = !counts ? 0.0f : args.weight_on_input ? 1.0f : args.weights[slot];
            factors[r] = counts ? weights[r] * output_factor(args, down, expert, 0, rows[r]) : 0.0f;
        }
    }
};

// Adds up the eight lanes of a column and halves a lane's values at each of three steps; which half stays with a lane, its bit
// `step` says. Sums of two do not depend on which lane adds them.
template <int COUNT>
__device__ __forceinline__ void fold(float (&kept)[COUNT / 2], const float (&v)[COUNT], int lane, int step) {
    const bool last = lane & step;
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
        const float mine = last ? v[COUNT / 2 + i] : v[i], other = last ? v[i] : v[COUNT / 2 + i];
        kept[i] = mine + __shfl_xor_sync(0xffffffffu, other, step);
    }
}

__device__ __forceinline__ void store_eight(const MoeArgs& args, const MoeStage& stage, u32 token, u32 channel, const float (&v)[8]) {
    const i64 at = token * args.out_stride + channel;
    if (args.out_type != F32 && channel + 8 <= stage.out_width && (reinterpret_cast<u64>(args.out) + 2 * at) % 16 == 0) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            words[i] = args.out_type == F16 ? half_pair(v[2 * i], v[2 * i + 1])
                                            : float_to_bfloat(v[2 * i]) | u32(float_to_bfloat(v[2 * i + 1])) << 16;
        *reinterpret_cast<uint4*>(static_cast<u16*>(args.out) + at) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (channel + i < stage.out_width) store_element(args.out, at + i, args.out_type, v[i]);
    }
}

extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 2) exl3_moe_combine_rows(const __grid_constant__ MoeArgs args) {
    const int lane = threadIdx.x & 31;
    const Signs signs = output_signs(lane);
    const MoeStage& down = args.stages[1];
    const u32 token = 2 * blockIdx.x + (lane >> 4), blocks = down.out_features / STRIP;
    wait_for_previous();
    let_next_start();
    Pick pick;
    pick.find(args, blockIdx.x, lane >> 2);
#pragma unroll 1
    for (u32 b = threadIdx.x / 32; b < blocks; b += blockDim.x / 32) {
        const u32 channel = b * STRIP + 8 * (lane & 3);
        float total[8] = {};
#pragma unroll 1
        for (u32 choice = 0; choice < args.top_k; choice += 8) {
            if (args.top_k > 8) pick.find(args, blockIdx.x, choice + (lane >> 2));
            StoredBlock stored;
            float sums[8][2][4], v[64];  // v [token][32 channels][8]
            stored.load(down, pick.rows, 0, b, lane);
            stored.rotate(sums, signs);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u16* svh = down.svh + pick.projections[r]->svh;
#pragma unroll
                for (int u = 0; u < 4; ++u) {
                    scaled_outputs(v + (4 * r + u) * 8, sums, u, r, pick.factors[r], eight_scales(svh, channel + 32 * u));
                    add_bias(v + (4 * r + u) * 8, down, *pick.projections[r], channel + 32 * u, pick.weights[r]);
                }
            }
            float half[32], quarter[16], eighth[8];
            fold<64>(half, v, lane, 16);
            fold<32>(quarter, half, lane, 8);
            fold<16>(eighth, quarter, lane, 4);
#pragma unroll
            for (int i = 0; i < 8; ++i) total[i] += eighth[i];
        }
        if (token < args.tokens) store_eight(args, down, token, channel + 32 * (lane >> 2 & 3), total);
    }
}

// out[token] = sum of its slots' rows times their routing weights, where rows are grouped: with their output Hadamard, svh and
// bias.
//
// A warp has a token, and of it every `split`th 128-block. H128 is H16 ⊗ H8: H16 by mma.m16n8k16, whose B operand is eight of the
// token's rows as they are stored, H8 by additions of a lane's own values. Bits of the channel's number:
//
//   bit       0         1         2         3     4     5         6
//   loaded    word      word      lane      half  lane  register  product
//   multiplied product  product   A         A     A     A         product
//   result    product   product   register  lane  lane  lane      product
//
// so a lane has twice eight neighbouring channels of two rows, and the rows are added up over four lanes. The order of a sum
// follows from the choices' numbers.
#include "moe/outputs.cuh"

constexpr int COMBINE_ROWS_THREADS = 128;

// A lane's choice of 32: its row in `sorted_slots` or NOWHERE, where its svh begins, its routing weight, and that times what undoes the
// row's scale.
struct Choice {
    u32 row, svh;
    float weight, factor;

    __device__ __forceinline__ void find(const MoeArgs& args, u32 token, u32 choice) {
        const MoeStage& down = args.stages[1];
        const u32 slot = token * args.top_k + choice;
        const int expert = choice < args.top_k ? expert_of(args, slot) : -1;
        const bool counts = expert >= 0;
        row = counts ? args.slot_positions[slot] : NOWHERE;
        svh = static_cast<u32>(projection_of(args, counts ? expert : 0, down.first).svh);
        weight = !counts ? 0.0f : args.weight_on_input ? 1.0f : args.weights[slot];
        factor = counts ? weight * output_factor(args, down, expert, 0, row) : 0.0f;
    }
};

// A lane's view of eight choices: the row that it loads, and the two whose results it has.
struct Eight {
    const uint4* row;  // or null
    const u16* svh[2];
    float factors[2];

    __device__ __forceinline__ void take(const MoeStage& down, const Choice& all, u32 first, int lane) {
        const u32 g = lane >> 2, q = lane & 3, own = __shfl_sync(0xffffffffu, all.row, first + g);
        row = own == NOWHERE ? nullptr : reinterpret_cast<const uint4*>(static_cast<const u16*>(down.out) + static_cast<u64>(own) * down.out_features) + q;
#pragma unroll
        for (u32 s = 0; s < 2; ++s) {
            const u32 from = first + 2 * q + s;
            svh[s] = down.svh + __shfl_sync(0xffffffffu, all.svh, from) + 8 * g;
            factors[s] = __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(all.factor), from));
        }
    }
    // Raw [bits 6 and 5].
    __device__ __forceinline__ void load(uint4 (&raw)[4], u32 block) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) raw[i] = row == nullptr ? make_uint4(0, 0, 0, 0) : row[block * (HADAMARD_SIZE / 8) + 4 * i];
    }
    // Scales [bit 6][row].
    __device__ __forceinline__ void load_scales(uint4 (&scales)[2][2], u32 block) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int s = 0; s < 2; ++s) scales[i][s] = eight_scales(svh[s], block * HADAMARD_SIZE + 64 * i);
    }
};

__device__ __forceinline__ void rotate_eight(float (&sums)[8][4], const uint4 (&raw)[4], const Signs& signs) {
    const float none[4] = {};
    const u32 a[4] = {signs.b[0][0], signs.b[1][0], signs.b[0][1], signs.b[1][1]};
#pragma unroll
    for (int high = 0; high < 2; ++high) {
        const uint4 &first = raw[2 * high], &second = raw[2 * high + 1];
        mma_half(sums[4 * high], a, first.x, second.x, none);
        mma_half(sums[4 * high + 1], a, first.y, second.y, none);
        mma_half(sums[4 * high + 2], a, first.z, second.z, none);
        mma_half(sums[4 * high + 3], a, first.w, second.w, none);
    }
}

// v [bit 6][channel]: both rows', with their scales.
__device__ __forceinline__ void add_two(float (&v)[16], const float (&sums)[8][4], const uint4 (&scales)[2][2], const float (&factors)[2]) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
        float first[8], second[8];
        convert_scales(first, scales[high][0]), convert_scales(second, scales[high][1]);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const float(&d)[4] = sums[4 * high + c % 4];
            v[8 * high + c] = d[2 * (c / 4)] * factors[0] * first[c] + d[2 * (c / 4) + 1] * factors[1] * second[c];
        }
    }
}

// Adds up a column's lanes and halves a lane's values at each step; which half stays with a lane, its bit `step` says. Sums of
// two do not depend on which lane adds them.
template <int COUNT>
__device__ __forceinline__ void fold(float (&kept)[COUNT / 2], const float (&v)[COUNT], int lane, int step) {
    const bool last = lane & step;
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
        const float mine = last ? v[COUNT / 2 + i] : v[i], other = last ? v[i] : v[COUNT / 2 + i];
        kept[i] = mine + __shfl_xor_sync(0xffffffffu, other, step);
    }
}

// Adds four channels' biases, in the order of the choices.
__device__ __forceinline__ void add_biases(float (&v)[4], const MoeArgs& args, u32 token, u32 channel) {
    const MoeStage& down = args.stages[1];
#pragma unroll 1
    for (u32 choice = 0; choice < args.top_k; ++choice) {
        const u32 slot = token * args.top_k + choice;
        const int expert = expert_of(args, slot);
        if (expert < 0) continue;
        const float* bias = down.bias + projection_of(args, expert, down.first).bias + channel;
        const float weight = args.weight_on_input ? 1.0f : args.weights[slot];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (channel + i < down.out_width) v[i] += weight * bias[i];
    }
}

__device__ __forceinline__ void store_four(const MoeArgs& args, const MoeStage& stage, u32 token, u32 channel, const float (&v)[4]) {
    const i64 at = token * args.out_stride + channel;
    if (args.out_type != F32 && channel + 4 <= stage.out_width && (reinterpret_cast<u64>(args.out) + 2 * at) % 8 == 0) {
        u32 words[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            words[i] = args.out_type == F16 ? half_pair(v[2 * i], v[2 * i + 1])
                                            : float_to_bfloat(v[2 * i]) | u32(float_to_bfloat(v[2 * i + 1])) << 16;
        *reinterpret_cast<uint2*>(static_cast<u16*>(args.out) + at) = make_uint2(words[0], words[1]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (channel + i < stage.out_width) store_element(args.out, at + i, args.out_type, v[i]);
    }
}

// Warps: `split` a token, as many as there are.
extern "C" __global__ void __launch_bounds__(COMBINE_ROWS_THREADS, 4) exl3_moe_combine_rows(const __grid_constant__ MoeArgs args) {
    const int lane = threadIdx.x & 31;
    const Signs signs(lane, 0x4253, 0x2543);
    const MoeStage& down = args.stages[1];
    const u32 warps = blockDim.x / 32, split = max(gridDim.x * warps / args.tokens, 1u), warp = blockIdx.x * warps + threadIdx.x / 32;
    const u32 token = warp / split, blocks = down.out_features / HADAMARD_SIZE;
    wait_on_dependent_grids();
    launch_dependent_grids();
    if (token >= args.tokens) return;
    Choice all;
    Eight eight;
    uint4 raw[4], scales[2][2];
    all.find(args, token, lane);
    eight.take(down, all, 0, lane);
    u32 block = warp % split, choice = 0;
    if (block >= blocks) return;
    eight.load(raw, block), eight.load_scales(scales, block);
    float total[4] = {};
#pragma unroll 1
    while (true) {
        float sums[8][4], v[16], half[8], quarter[4];
        rotate_eight(sums, raw, signs);
        const u32 now = block, at = choice;
        choice += 8;
        const bool done = choice >= args.top_k;
        if (done) choice = 0, block += split;
        const float factors[2] = {eight.factors[0], eight.factors[1]};
        if (args.top_k > 8) {
            if (args.top_k > 32 && choice % 32 == 0) all.find(args, token, choice + lane);
            eight.take(down, all, choice % 32, lane);
        }
        if (block < blocks) eight.load(raw, block);  // the next are on their way while these are added up
        hadamard8(sums);
        add_two(v, sums, scales, factors);
        if (block < blocks) eight.load_scales(scales, block);
        fold<16>(half, v, lane, 1);
        fold<8>(quarter, half, lane, 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] = at == 0 ? quarter[i] : total[i] + quarter[i];
        if (!done) continue;
        const u32 channel = now * HADAMARD_SIZE + (lane & 2) * 2 + (lane >> 2) * 8 + (lane & 1) * 64;
        if (down.bias != nullptr) add_biases(total, args, token, channel);
        store_four(args, down, token, channel, total);
        if (block >= blocks) break;
    }
}

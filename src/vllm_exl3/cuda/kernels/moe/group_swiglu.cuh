// The second stage's input where rows are grouped, of experts with SwiGLU and without biases: the first stage's outputs, eight rows
// at a time, through their output transform, the activation and the input transform of down.
//
// H128 is H16 ⊗ H8: H16 by mma.m16n8k16, whose B operand are eight rows as they are stored, H8 by additions of a lane's own values.
// Bits of the channel's number; a lane's rows are q and q + 4 of eight:
//
//   bit          0         1         2      3      4        5        6
//   loaded       word      lane      lane   half   product  product  register
//   activated    product   register  lane   lane   product  product  lane
//   multiplied   product   register  half   lane   product  product  lane     (words transposed, so that a lane has one row)
//   stored       product   lane      lane   lane   product  product  register
//
// so that a lane stores sixteen bytes of the layout that wgmma reads.
#pragma once
#include "moe/group_hidden.cuh"

// Rows q + 4s are columns 2q + s.
__device__ __forceinline__ u32 row_of_column(u32 column) { return (column >> 1) + 4 * (column & 1); }

// Of every 8×8 matrix of halves whose rows lanes hold by fours: its columns.
__device__ __forceinline__ u32 transpose_halves(u32 word) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
    return result;
}

// Rows of a chunk that are transformed together, and a lane's part of them.
struct EightRows {
    u32 first, count, start, k_block_bytes;  // in `sorted_slots`; bytes from one k block of the expert's rows to the next
    u32 loaded;                           // the row that the lane loads; rows beyond the last repeat it
    u32 rows[2];                          // those that it activates

    __device__ __forceinline__ EightRows(const MoeArgs& args, const RowBlock& block, u32 half, int lane) {
        first = block.first + GROUP_ROWS * half, count = min(block.rows - GROUP_ROWS * half, GROUP_ROWS), start = args.starts[block.expert];
        k_block_bytes = (args.starts[block.expert + 1] - start) * BLOCK_K * 2;
        loaded = first + min(row_of_column(lane >> 2), count - 1);
#pragma unroll
        for (u32 s = 0; s < 2; ++s) rows[s] = first + min((lane & 3) + 4 * s, count - 1);
    }
    __device__ __forceinline__ u8* group(const MoeStage& stage) const {
        return stage.rows + static_cast<u64>(start) * 2 * stage.in_features + (first - start) / GROUP_ROWS * GROUP_BYTES;
    }
};

// Sixteen channels of a lane: four times four neighbours.
struct LaneScales {
    uint2 raw[4];
    __device__ __forceinline__ void load(const u16* scales, u32 block, int lane) {
        const u32 g = lane >> 2, channel = block * HADAMARD_SIZE + (g & 3) * 4 + (g >> 2) * 64;
#pragma unroll
        for (int i = 0; i < 4; ++i) raw[i] = *reinterpret_cast<const uint2*>(scales + channel + 16 * i);
    }
    // Of product t and register r.
    __device__ __forceinline__ float get(int t, int r) const {
        const u32 word = r ? raw[t / 2].y : raw[t / 2].x;
        return half_to_float(u16(t & 1 ? word >> 16 : word));
    }
};

// A lane's part of 128 stored channels of one projection, rotated and scaled: sums[t][2r + s].
struct LaneOutputs {
    uint2 raw[8];
    __device__ __forceinline__ void load(const MoeStage& stage, u32 row, u32 index, u32 block, int lane) {
        const u64 at = (static_cast<u64>(row) * stage.projections + index) * stage.out_features + block * HADAMARD_SIZE + 4 * (lane & 3);
        const uint2* from = reinterpret_cast<const uint2*>(static_cast<const u16*>(stage.out) + at);
#pragma unroll
        for (int i = 0; i < 8; ++i) raw[i] = from[4 * i];
    }
    __device__ __forceinline__ void rotate(float (&sums)[8][4], const Signs& signs) const {
        const float none[4] = {};
        const u32 a[4] = {signs.b[0][0], signs.b[1][0], signs.b[0][1], signs.b[1][1]};
#pragma unroll
        for (int i = 0; i < 4; ++i) mma_half(sums[2 * i], a, raw[i].x, raw[i + 4].x, none), mma_half(sums[2 * i + 1], a, raw[i].y, raw[i + 4].y, none);
        hadamard8(sums);
    }
};

// Shared memory: activated words [128-block][4][lane], the largest of eight rows of every 128-block and of all, and their sums.
struct SwigluMemory {
    uint4* words;
    u32 *largest, *most;
    float* totals;
    __device__ __forceinline__ SwigluMemory(u8* memory, u32 blocks)
        : words(reinterpret_cast<uint4*>(memory)), largest(reinterpret_cast<u32*>(words + blocks * 128)), most(largest + blocks * GROUP_ROWS),
          totals(reinterpret_cast<float*>(most + GROUP_ROWS)) {}
};

// Stores a 128-block of eight rows, activated and times suh, in shared memory: in fp16, with a power of two for each row.
__device__ __forceinline__ void activate_eight(const MoeArgs& args, const MoeStage& stage, const RowBlock& block, const EightRows& eight,
                                               const float (&factors)[2][2], const Signs& signs, const SwigluMemory& memory, u32 b, int lane) {
    const MoeStage& first = args.stages[0];
    LaneOutputs gate, up;
    LaneScales scales[3];
    gate.load(first, eight.loaded, 0, b, lane), up.load(first, eight.loaded, 1, b, lane);
    scales[0].load(first.svh + projection_of(args, block.expert, 0).svh, b, lane);
    scales[1].load(first.svh + projection_of(args, block.expert, 1).svh, b, lane);
    scales[2].load(stage.suh + projection_of(args, block.expert, 2).suh, b, lane);
    float hidden[8][4], ups[8][4];
    gate.rotate(hidden, signs);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const float value = at_most(hidden[i / 4][i % 4] * factors[0][i % 2] * scales[0].get(i / 4, i / 2 % 2), args.limit);
        hidden[i / 4][i % 4] = value * sigmoid(args.alpha * value);
    }
    up.rotate(ups, signs);
    u32 most[2] = {};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const float value = within(ups[i / 4][i % 4] * factors[1][i % 2] * scales[1].get(i / 4, i / 2 % 2), args.limit) + args.beta;
        hidden[i / 4][i % 4] *= value * scales[2].get(i / 4, i / 2 % 2);
    }
    if ((b + 1) * HADAMARD_SIZE > stage.in_width) {
        const u32 g = lane >> 2, channel = b * HADAMARD_SIZE + (g & 3) * 4 + (g >> 2) * 64;
#pragma unroll
        for (int i = 0; i < 32; ++i)
            if (channel + i / 4 % 2 + 2 * (i / 2 % 2) + 16 * (i / 8) >= stage.in_width) hidden[i / 4][i % 4] = 0.0f;
    }
    float powers[2];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int i = s; i < 32; i += 2) most[s] = max(most[s], __float_as_uint(fabsf(hidden[i / 4][i % 4])));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) most[s] = max(most[s], __shfl_xor_sync(0xffffffffu, most[s], step));
        powers[s] = __uint_as_float(local_exponent(most[s]) << 23);
        if (lane < 4) memory.largest[b * GROUP_ROWS + lane + 4 * s] = most[s], atomicMax(&memory.most[lane + 4 * s], most[s]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // products 2i and 2i + 1, registers 0 and 1
            const float(&v)[4] = hidden[2 * i + j / 2];
            words[j] = transpose_halves(half_pair(v[2 * (j % 2)] * powers[0], v[2 * (j % 2) + 1] * powers[1]));
        }
        memory.words[(4 * b + i) * 32 + lane] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Rotates and stores them; `scales` of the lane's rows.
__device__ __forceinline__ void store_eight_rows(const MoeStage& stage, const EightRows& eight, const RowScale (&scales)[2], const Signs& signs,
                                                 const SwigluMemory& memory, u32 b, int lane) {
    const u32 g = lane >> 2, q = lane & 3, a[4] = {signs.b[0][0], signs.b[1][0], signs.b[0][1], signs.b[1][1]};
    const float none[4] = {};
    float sums[8][4], factors[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4 raw = memory.words[(4 * b + i) * 32 + lane];
        mma_half(sums[2 * i], a, raw.x, raw.y, none), mma_half(sums[2 * i + 1], a, raw.z, raw.w, none);
    }
    hadamard8(sums);
    u8* at = eight.group(stage) + static_cast<u64>(2 * b) * eight.k_block_bytes + (2 * (g & 1) + 4 * (g >> 1 & 1) + (g >> 2)) * 128 + q * 16;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
        const int exponent = static_cast<int>(factor_exponent(scales[s])) + 127 -
            static_cast<int>(local_exponent(memory.largest[b * GROUP_ROWS + q + 4 * s]));
        factors[s] = exponent > 0 ? __uint_as_float(min(exponent, 254) << 23) * HADAMARD_SCALE : 0.0f;
        float total = 0.0f;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                words[i] = half_pair(sums[2 * i][2 * r + s] * factors[s], sums[2 * i + 1][2 * r + s] * factors[s]);
                total += half_to_float(u16(words[i])) + half_to_float(u16(words[i] >> 16));
            }
            *reinterpret_cast<uint4*>(at + static_cast<u64>(r) * eight.k_block_bytes + s * 64) = make_uint4(words[0], words[1], words[2], words[3]);
        }
#pragma unroll
        for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
        if (g == 0) memory.totals[b * GROUP_ROWS + q + 4 * s] = total;
    }
}

// One thread block: eight rows of a chunk at a time. A row's largest value is needed before anything can be stored.
__device__ __forceinline__ void transform_swiglu(const MoeArgs& args, const MoeStage& stage, u8* shared) {
    const int lane = threadIdx.x & 31;
    const u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), warps = blockDim.x / 32, blocks = stage.in_features / HADAMARD_SIZE;
    const u32 count = 2 * args.list_sizes[1];
    const Signs out_signs(lane, 0x2163, 0x1632), in_signs(lane, 0x6312, 0x6321);
    const SwigluMemory memory(shared, blocks);
    if (threadIdx.x < GROUP_ROWS) memory.most[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll 1
    for (u32 i = blockIdx.x; i < count; i += gridDim.x) {
        const RowBlock block = args.chunks[i / 2];
        if (i % 2 * GROUP_ROWS >= block.rows) continue;
        const EightRows eight(args, block, i % 2, lane);
        float factors[2][2];
#pragma unroll
        for (int j = 0; j < 4; ++j) factors[j / 2][j % 2] = output_factor(args, args.stages[0], block.expert, j / 2, eight.rows[j % 2]);
#pragma unroll 1
        for (u32 b = warp; b < blocks; b += warps) activate_eight(args, stage, block, eight, factors, out_signs, memory, b, lane);
        __syncthreads();
        RowScale scales[2];
#pragma unroll
        for (int s = 0; s < 2; ++s) scales[s] = row_scale(HALF, memory.most[(lane & 3) + 4 * s]);
#pragma unroll 1
        for (u32 b = warp; b < blocks; b += warps) store_eight_rows(stage, eight, scales, in_signs, memory, b, lane);
        __syncthreads();
        if (threadIdx.x < GROUP_ROWS) {
            float sum = 0.0f;
            for (u32 b = 0; b < blocks; ++b) sum += memory.totals[b * GROUP_ROWS + threadIdx.x];
            if (threadIdx.x < eight.count) {
                sums_of_rows(stage)[eight.first + threadIdx.x] = sum;
                stage.descale[eight.first + threadIdx.x] = row_scale(HALF, memory.most[threadIdx.x]).descale;
            }
            memory.most[threadIdx.x] = 0;
        }
        __syncthreads();
    }
}

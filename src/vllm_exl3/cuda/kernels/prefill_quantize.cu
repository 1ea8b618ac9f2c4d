// The input side of prefill's fast mode: A = H(x·suh)/sqrt(128) of every row and shard in int8, a scale a row, in the order in
// which wgmma reads it as its B operand; prefill_int8.cuh says how k is permuted.
//
// A block goes through groups of a few whole rows. A thread has 32 channels of a row, four neighbours a 128-block, and keeps
// them in registers, rotated, until the row's largest magnitude is known: x is read once. The next rows are on their way to
// shared memory meanwhile.
#include "hadamard.cuh"
#include "prefill_item.cuh"

constexpr int MOST_THREADS = 1024, MOST_ROWS = 4, PART = 32;
constexpr u32 PARTS = STRIP / PART;  // of a 128-block
constexpr float LARGEST_BYTE = 127.0f;
constexpr float STEP = 4.0f * 1774 / 262144;  // of a weight: 4·k_inv

// From row to row in shared memory: what keeps eight lanes' reads, of one or two rows, free of bank conflicts.
__device__ __forceinline__ u32 held_pitch(const PrefillArgs& args) { return args.in_features / UNIT_IN * UNIT_PITCH / 128 * 128 + 128 + 32; }

__device__ __forceinline__ void hold_group(const PrefillArgs& args, u8* rows, u32 group) {
    const u32 width = args.in_features / 8, first = group * args.block_rows, count = min(args.block_rows, args.rows - first);
    for (u32 i = threadIdx.x; i < count * width; i += blockDim.x) {
        const u32 row = i / width, piece = i - row * width;
        u8* to = rows + row * held_pitch(args) + piece / 8 * UNIT_PITCH + piece % 8 * 16;
        const u16* x = static_cast<const u16*>(args.x) + (first + row) * args.x_stride + 8 * piece;
        if (8 * piece < args.in_width) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(x) : "memory");
        else *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    }
}

// x·suh of part `part` of a row; `held`: the row in shared memory, or null.
__device__ __forceinline__ void load_part(float (&v)[PART], const PrefillArgs& args, const u8* held, const u16* suh, u32 row, u32 part) {
    const uint4* scales = reinterpret_cast<const uint4*>(suh + part * PART);
#pragma unroll
    for (int i = 0; i < PART / 8; ++i) {
        float x[8], factors[8];
        if (held != nullptr) {
            unpack(x, reinterpret_cast<const uint4*>(held + part / 2 * UNIT_PITCH + part % 2 * (2 * PART))[i], args.x_type);
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const u32 column = part * PART + 8 * i + j;
                x[j] = column < args.in_width ? load_element(args.x, row * args.x_stride + column, args.x_type) : 0.0f;
            }
        }
        unpack(factors, scales[i], F16);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[8 * i + j] = x[j] * factors[j];
    }
}

// H over a 128-block of four neighbouring lanes; unscaled.
__device__ __forceinline__ void rotate_part(float (&v)[PART], int lane) {
#pragma unroll
    for (int step = 1; step < PART; step *= 2)
#pragma unroll
        for (int i = 0; i < PART; ++i)
            if (!(i & step)) {
                const float a = v[i], b = v[i + step];
                v[i] = a + b, v[i + step] = a - b;
            }
#pragma unroll
    for (int lanes = 1; lanes < int(PARTS); lanes *= 2) {
        const float sign = lane & lanes ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < PART; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xffffffffu, v[i], lanes));
    }
}

// Four values times `factor`, rounded to int8: adding 1.5·2^23 leaves the integer in the lowest bits of the sum.
__device__ __forceinline__ u32 pack_bytes(float a, float b, float c, float d, float factor) {
    const float values[4] = {a, b, c, d};
    u32 rounded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) rounded[i] = __float_as_uint(fmaf(values[i], factor, 12582912.0f));
    return __byte_perm(__byte_perm(rounded[0], rounded[1], 0x0040), __byte_perm(rounded[2], rounded[3], 0x0040), 0x5410);
}

// Rounds a part and stores it: two of the four k-tiles of a unit, whose other two the neighbour has. Of the unit's four
// 16-byte rows each of them stores two.
__device__ __forceinline__ void store_part(const float (&v)[PART], const PrefillArgs& args, u32 shard, u32 row, u32 part, bool exists, float factor) {
    u32 words[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const float* of = v + 16 * tile + 2 * i;
            words[i][tile] = pack_bytes(of[0], of[1], of[8], of[9], factor);
        }
    const bool odd = part & 1;
    uint4 mine[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 a = __shfl_xor_sync(0xffffffffu, odd ? words[i][0] : words[i + 2][0], 1), b = __shfl_xor_sync(0xffffffffu, odd ? words[i][1] : words[i + 2][1], 1);
        mine[i] = odd ? make_uint4(a, b, words[i + 2][0], words[i + 2][1]) : make_uint4(words[i][0], words[i][1], a, b);
    }
    if (!exists) return;
    const u32 units = args.in_features / UNIT_IN, row_tile = row / args.tile_rows, token = row % args.tile_rows;
    uint4* to = reinterpret_cast<uint4*>(args.activations) +
        (static_cast<u64>(shard * args.row_tiles + row_tile) * units + part / 2) * (args.tile_rows * 4) + (odd ? 2 * args.tile_rows : 0) + token;
    to[0] = mine[0], to[args.tile_rows] = mine[1];
}

// Grid (as many blocks as run at once, or as there are groups of args.block_rows rows; shards). As many threads as a group
// has parts, rounded up to warps.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1) exl3_prefill_quantize(const __grid_constant__ PrefillArgs args) {
    extern __shared__ __align__(16) u8 rows[];  // of two groups
    __shared__ u32 largest[2][MOST_ROWS];
    const bool held = loads_vectors(args);
    const u32 s = blockIdx.y, groups = (args.rows + args.block_rows - 1) / args.block_rows, bytes = args.block_rows * held_pitch(args);
    // A warp's rows take turns by 128-blocks.
    const u32 block = threadIdx.x / PARTS, in_group = block % args.block_rows, part = PARTS * (block / args.block_rows) + threadIdx.x % PARTS;
    const bool inside = part < args.in_features / PART;
    const int lane = threadIdx.x & 31;
    u32 group = blockIdx.x, buffer = 0;
    let_next_start();
    if (threadIdx.x < 2 * MOST_ROWS) largest[threadIdx.x / MOST_ROWS][threadIdx.x % MOST_ROWS] = 0;
    wait_for_previous();
    if (held && group < groups) hold_group(args, rows, group);
    for (; group < groups; group += gridDim.x, buffer ^= 1) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        if (held && group + gridDim.x < groups) hold_group(args, rows + (buffer ^ 1) * bytes, group + gridDim.x);
        const u32 row = group * args.block_rows + in_group;
        const bool exists = inside && row < args.rows;
        float v[PART] = {};
        if (exists) load_part(v, args, held ? rows + buffer * bytes + in_group * held_pitch(args) : nullptr, args.shards[s].suh, row, part);
        rotate_part(v, lane);
        float most[2] = {};  // chains that do not wait for each other
#pragma unroll
        for (int i = 0; i < PART; ++i) most[i % 2] = larger(most[i % 2], v[i]);
        u32 bits = __float_as_uint(larger(most[0], most[1]));
        for (u32 lanes = 1; lanes < 32; lanes *= 2)
            if (lanes < PARTS || lanes >= PARTS * args.block_rows) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, lanes));
        if (lane < int(PARTS * args.block_rows) && lane % PARTS == 0) atomicMax(&largest[buffer][in_group], bits);
        __syncthreads();
        const float top = __uint_as_float(largest[buffer][in_group]);
        if (threadIdx.x < MOST_ROWS) largest[buffer ^ 1][threadIdx.x] = 0;
        // A row of zeros or subnormals gives zeros; one with a NaN or an infinity comes out as such, by its scale.
        const float factor = top >= 1.0e-36f ? LARGEST_BYTE / top : 0.0f;
        if (exists && part == 0) args.scales[s * args.rows + row] = top * (HADAMARD_SCALE * STEP / LARGEST_BYTE);
        store_part(v, args, s, row, part, exists, factor);
    }
}

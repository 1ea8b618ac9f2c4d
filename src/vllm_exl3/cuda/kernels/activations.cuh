// Where the GEMM's B operand comes from.
//
// Fragments: the transform kernel wrote them in fragment order, they travel through the ring with the weights.
// Planes:    for few tokens the GEMM rotates the input itself. Every block finds the rows' scales from the whole rows, keeps
//            the values that its own units multiply in shared memory, one row after the other, and needs no launch before it.
#pragma once
#include "epilogue.cuh"
#include "rotation.cuh"

// The B operand of a whole unit in fragment order: matrices × column groups, one word a lane each.
template <class K>
__device__ __forceinline__ void load_fragments(u32 (&b)[K::columns][K::matrices], u32 address, u32 stored_rows, int lane) {
    const u32 stored = stored_rows * token_rows(K::arithmetic), matrix = lane >> 3;
#pragma unroll
    for (int group = 0; group < K::columns; ++group) {
        const u32 row = 8 * group + (lane & 7), clamped = row < stored ? row : stored - 1;
        const u32 from = address + (matrix * stored + clamped) * 16;
#pragma unroll
        for (int m = 0; m < K::matrices; m += 4)
            load_matrices(b[group][m], b[group][m + 1], b[group][m + 2], b[group][m + 3], from + m * stored * 16);
    }
}

struct Planes {
    u32 address;   // shared; row r at address + r·plane_stride; a row holds a unit in 64 (INTEGER) or 128 bytes
    int* sums;     // shared [stored rows][plane_units]: sums of a unit's quantised activations
    u32* largest;  // shared [stored rows]
    u32 shard;     // whose activations are there
    u32 first;     // unit of k in place 0; the units after it follow, cyclically

    __device__ __forceinline__ u32 place(u32 k, u32 depth) const { return k >= first ? k - first : k + depth - first; }

    // Rotates what the units [begin, end) of a shard multiply. All threads of the block call it.
    __device__ __forceinline__ void fill(const LinearArgs& args, u32 index, u32 begin, u32 end, int warp, int lane) {
        const ShardArgs& at = args.shards[index];
        const u32 depth = at.in_features / UNIT_IN, blocks = depth / 2, first_row = blockIdx.y * args.tile_rows;
        const u32 rows = min(args.tile_rows, args.rows - first_row), count = min(end - begin, depth);
        shard = index, first = (begin - at.first_unit) % depth;
        if (threadIdx.x < args.stored_rows) largest[threadIdx.x] = 0;
        // `share` warps take a row. Where one batch holds a warp's 128-blocks, their values stay in registers from the search for
        // the largest to the rounding; else what the block's units need is computed again.
        const bool integer = at.arithmetic == INTEGER;
        const u32 share = rows < WARPS ? WARPS / rows : 1, row_step = WARPS / share, offset = warp % share;
        const bool held = blocks <= HELD * share && rows <= row_step;
        Batch<HELD> batch;
        __syncthreads();
        for (u32 row = warp / share; row < rows; row += row_step) {
            u32 bits = 0;
            for (u32 base = offset; base < blocks; base += HELD * share) {
                batch.load(args, at, integer, lane, [&](int i) {
                    return BatchPlace{first_row + row, base + i * share, base + i * share < blocks};
                });
#pragma unroll
                for (int i = 0; i < HELD; ++i)
                    if (base + i * share < blocks) bits = max(bits, magnitude_bits(batch.v[i]));
            }
            bits = __reduce_max_sync(0xffffffffu, bits);
            if (lane == 0) atomicMax(&largest[row], bits);
        }
        __syncthreads();
        const u32 begin_block = held ? 0 : first / 2, needed = held ? blocks : min(blocks, (first % 2 + count + 1) / 2);
        for (u32 row = warp / share; row < rows; row += row_step) {
            const float factor = row_scale(at.arithmetic, largest[row]).factor;
            for (u32 base = offset; base < needed; base += HELD * share) {
                const auto place_of = [&](int i) {
                    const u32 block = begin_block + base + i * share;
                    return BatchPlace{first_row + row, block < blocks ? block : block - blocks, base + i * share < needed};
                };
                if (!held) batch.load(args, at, true, lane, place_of);
#pragma unroll
                for (int i = 0; i < HELD; ++i) {
                    const BatchPlace here = place_of(i);
                    const u32 unit = place(2 * here.block + (lane >> 4), depth);
                    if (!here.exists || __all_sync(0xffffffffu, unit >= count)) continue;
                    if (held && !integer) hadamard128(batch.v[i], lane);
                    const int sum = store(batch.v[i], factor, at.arithmetic, row, unit, unit < count, args, lane);
                    if (integer && (lane & 15) == 0 && unit < count) sums[row * args.plane_units + unit] = sum;
                }
            }
        }
        __syncthreads();
    }

    static constexpr int HELD = 2;

    // Writes a lane's four consecutive k of one unit; returns the sum over the unit's half warp.
    __device__ __forceinline__ int store(const float (&v)[4], float factor, u32 arithmetic, u32 row, u32 unit, bool wanted,
                                         const LinearArgs& args, int lane) const {
        if (arithmetic != INTEGER) {
            const u32 at = address + row * args.plane_stride + unit * 128 + (lane & 15) * 8;
            if (wanted)
                asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(half_pair(v[0] * factor, v[1] * factor)),
                             "r"(half_pair(v[2] * factor, v[3] * factor)) : "memory");
            return 0;
        }
        u32 high = 0, low = 0;
        int sum = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int a = __float2int_rn(v[i] * factor), top = (a + 64) >> 7;
            high |= (u32(top) & 0xffu) << (8 * i), low |= (u32(a - 128 * top) & 0xffu) << (8 * i);
            sum += a;
        }
        const u32 at = address + 2 * row * args.plane_stride + unit * 64 + (lane & 15) * 4;
        if (wanted) {
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(high) : "memory");
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(at + args.plane_stride), "r"(low) : "memory");
        }
        return __reduce_add_sync(lane < 16 ? 0xffffu : 0xffff0000u, sum);
    }

    // The B operand of a unit; lane (g, q) owns column g and the 16 k of k-tile q.
    template <class K>
    __device__ __forceinline__ void load(u32 (&b)[K::columns][K::matrices], const LinearArgs& args, u32 unit, int lane) const {
        const u32 stored = args.stored_rows * token_rows(K::arithmetic);
        constexpr u32 unit_bytes = K::arithmetic == INTEGER ? 64 : 128;
#pragma unroll
        for (int group = 0; group < K::columns; ++group) {
            const u32 row = min(8u * group + (lane >> 2), stored - 1);
            const SharedWords words{address + row * args.plane_stride + unit * unit_bytes + (lane & 3) * (unit_bytes / 4)};
            u32 w[unit_bytes / 16];
            words.run(w, 0);
            if constexpr (K::arithmetic == HALF) {
#pragma unroll
                for (int m = 0; m < 8; ++m) b[group][m] = w[m / 2 + 4 * (m % 2)];
            } else {
#pragma unroll
                for (int m = 0; m < 16; ++m) {
                    const int k = 2 * (m >> 2) + 8 * (m >> 1 & 1) + (m & 1);  // matrix m = 4i + 2h + b holds k = 2i + 8h + b
                    b[group][m] = K::arithmetic == INTEGER ? __byte_perm(w[k / 4], 0, 0x1111 * (k % 4))
                                                           : __byte_perm(w[k / 2], 0, k % 2 ? 0x3232 : 0x1010);
                }
            }
        }
    }
};

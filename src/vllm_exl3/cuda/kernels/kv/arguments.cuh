// Decoding over the int4 KV cache: arguments, shapes, and which block attends what. The format is attention/layout.py's.
#pragma once
#include "base/types.cuh"

constexpr int KV_WARPS = 4, KV_THREADS = 32 * KV_WARPS;
constexpr int KV_GROUP = 16, KV_TILE = KV_GROUP * KV_WARPS;  // tokens of a warp's product, and of a step
constexpr float KV_LOWEST = -1e30f;                          // minus infinity whose differences are no NaN

// Strides of the cache are in bytes, others in elements. Mirrored by vllm_exl3/attention/native.py.
struct KvDecodeArgs {
    const u8* cache;
    const void* query;
    const int* table;
    const int* lengths;
    const int* starts;
    const float* signs;   // of the rotation, as many as SIZE
    float* partial;       // as merge_kernel of attention/merge.py reads it
    float* stats;
    i64 page_stride, head_stride, table_stride, query_stride;
    u32 slot_stride, page, page_shift;  // tokens a page, and its logarithm; 32 where it is no power of two
    u32 segments, max_query, block_query, query_blocks, group, kv_heads, head_blocks, window, query_type;
    float scale, soft_cap;
};

// SIZE: of a head. TILES: of 8 query rows. STAGES: tiles of the ring. CHUNK: bytes of a copy. HELD: queries stay in registers.
template <int SIZE_, int TILES_, int STAGES_, int CHUNK_, bool HELD_>
struct KvShape {
    static constexpr int SIZE = SIZE_, TILES = TILES_, STAGES = STAGES_, CHUNK = CHUNK_;
    static constexpr bool HELD = HELD_;
    static constexpr int ROWS = 8 * TILES;
    static constexpr int SLOT = SIZE + 8;                        // bytes of a token: keys, their scale, values, their scale
    static constexpr int KEY_SCALE = SIZE / 2, VALUES = SIZE / 2 + 4, VALUE_SCALE = SIZE + 4;
    static constexpr int WORDS = SIZE / 32;                      // of a token's keys that one thread multiplies
    static constexpr int SLICES = SIZE / 64;                     // of 64 elements of the output
    static constexpr int OWN = SLICES < KV_WARPS ? 1 : SLICES / KV_WARPS;  // slices of a warp
    static constexpr int SHARE = SLICES < KV_WARPS ? KV_WARPS / SLICES : 1;  // warps that share a slice, each with its tokens
    static constexpr int STAGE_BYTES = KV_TILE * SLOT;
    static constexpr int QUERY_PITCH = 2 * SIZE + 64;            // bytes; 64 more keep the lanes' reads free of bank conflicts
    static constexpr int WEIGHT_PITCH = 2 * KV_TILE + 32;        // the same
    static constexpr int QUERY_BYTES = ROWS * QUERY_PITCH, WEIGHT_BYTES = 2 * ROWS * WEIGHT_PITCH;
    // Where queries go to registers, they pass through the last stage, which is filled later.
    static constexpr int QUERY_AT = HELD ? (STAGES - 1) * STAGE_BYTES : STAGES * STAGE_BYTES;
    static constexpr int WEIGHTS_AT = STAGES * STAGE_BYTES + (HELD ? 0 : QUERY_BYTES);
    static constexpr int SHIFTS_AT = WEIGHTS_AT + WEIGHT_BYTES;  // of the zero-points, for even and odd nibbles
    static constexpr int SHIFT_BYTES = 2 * KV_TILE;
    static constexpr int ROWS_AT = SHIFTS_AT + 4 * SHIFT_BYTES;
};

// A block's rows, in shared memory.
template <int ROWS>
struct KvRows {
    float tops[ROWS][KV_WARPS];  // what each warp's weights are relative to, binary logarithms
    float old_top[ROWS];         // what the sums are relative to
    float raised[ROWS];          // product of the query with what nibbles come raised by
    float sum[ROWS];             // of the query's elements, for the zero-points
    float unit[ROWS / 8];        // what a 1 in the queries of 8 rows means
    float largest[KV_WARPS];
    int position[ROWS];
    u32 changed[2];              // 1 + the last step in which a warp raised its top, by the step's parity
};

template <class S>
constexpr int kv_shared_bytes() { return S::ROWS_AT + int(sizeof(KvRows<S::ROWS>)); }

// One block's work: query rows of one KV head over one segment of the context.
struct KvWork {
    u32 segment, program, request, head, head_block;
    int start, count, length, context, block;  // block: first query token
    int begin, end;                            // tiles of the segment
    int skipped;                               // tiles before the window
    u32 seen;                                  // tiles that some row sees

    __device__ __forceinline__ void tiles(const KvDecodeArgs& args, int length, int first) {
        const int last = min(first + int(args.block_query), length) - 1;
        skipped = args.window ? max(first - int(args.window) + 1, 0) / KV_TILE : 0;
        seen = u32((last + KV_TILE) / KV_TILE - skipped);
    }
    __device__ __forceinline__ int tile(const KvDecodeArgs& args, u32 segment) const {
        return skipped + int(seen * segment / args.segments);
    }
    __device__ __forceinline__ bool some(const KvDecodeArgs& args, u32 segment) const {
        return tile(args, segment) < tile(args, segment + 1);
    }

    // False where nothing is to be done.
    __device__ __forceinline__ bool find(const KvDecodeArgs& args) {
        segment = blockIdx.x % args.segments, program = blockIdx.x / args.segments;
        const u32 heads = args.kv_heads * args.head_blocks, rest = program / heads;
        head = program % heads / args.head_blocks, head_block = program % args.head_blocks;
        request = rest / args.query_blocks, block = int(rest % args.query_blocks * args.block_query);
        start = args.starts[request], count = args.starts[request + 1] - start;
        length = args.lengths[request], context = length - count;
        if (count < 1 || count > int(args.max_query) || block >= count) return false;
        tiles(args, length, context + block);
        begin = tile(args, segment), end = tile(args, segment + 1);
        return begin < end;
    }
    // The query token and head of a row; false where there is none.
    __device__ __forceinline__ bool row(const KvDecodeArgs& args, int row, int rows, int& token, int& query_head) const {
        int in_group = int(head_block) * rows + row;
        token = block;
        if (args.head_blocks == 1) token += row / int(args.group), in_group = row % int(args.group);
        query_head = int(head * args.group) + in_group;
        return token < count && token < block + int(args.block_query) && in_group < int(args.group);
    }
};

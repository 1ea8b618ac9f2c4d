// Decoding over the int4 KV cache: a block attends the query rows of one KV head to one segment of the context.
//
// Products are transposed: nibbles are the left operand, in registers, so that one unpacking serves all rows. Of a tile of 64
// tokens each warp multiplies the keys of 16 with the queries, and stores weights in shared memory; after a barrier, the
// step's only one, each multiplies its share of the values' elements with all 64 weights. Copies run two tiles ahead.
//
// Exactness is that of attention/attend.py: nibbles are exact in float16, queries come to its range by a power of two, a
// value's scale goes into the exponent of its weight. Zero-points of keys are applied in float32 to the rounded queries, those
// of values to the nibbles, exactly.
#pragma once
#include "kv/values.cuh"
#include "base/launch.cuh"

// A warp copies its 16 tokens of a tile.
template <class S>
struct KvCopies {
    const KvDecodeArgs& args;
    const KvWork& work;
    const KvPlace& place;
    const u8* cache;  // of this KV head
    int number;       // page of the tile that is copied next

    __device__ __forceinline__ u32 page_index(u32 token) const {
        return args.page_shift < 32 ? token >> args.page_shift : token / args.page;
    }
    // The page of this warp's tokens of a tile; 0 past the end, where nothing is copied.
    __device__ __forceinline__ int page_of(int tile) const {
        const int token = tile * KV_TILE + place.warp * KV_GROUP;
        return tile < work.end && token < work.length ? args.table[i64(work.request) * args.table_stride + page_index(token)] : 0;
    }

    // Starts copying this warp's tokens of a tile.
    __device__ __forceinline__ void fetch(int tile, int stage, int page) {
        const int token = tile * KV_TILE + place.warp * KV_GROUP;
        if (tile < work.end && token < work.length) {
            const u32 inside = u32(token) - page_index(token) * args.page;
            const u8* source = cache + i64(page) * args.page_stride + u64(inside) * args.slot_stride;
            const u32 target = place.base + stage * S::STAGE_BYTES + place.warp * KV_GROUP * S::SLOT;
            constexpr int chunks = KV_GROUP * S::SLOT / S::CHUNK, a_slot = S::SLOT / 8;
#pragma unroll
            for (int first = 0; first < chunks; first += 32) {
                const int chunk = first + place.lane;
                if (first + 32 > chunks && chunk >= chunks) break;
                // Chunks of 16 bytes are for slots that follow each other.
                const u8* from = S::CHUNK == 16 ? source + 16 * chunk : source + u64(chunk / a_slot) * args.slot_stride + chunk % a_slot * 8;
                start_copy<S::CHUNK>(target + S::CHUNK * chunk, from);
            }
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void fetch_next(int tile, int stage) {
        fetch(tile, stage, number);
        number = page_of(tile + 1);
    }
};

template <class S>
__device__ __forceinline__ void kv_decode(const KvDecodeArgs& args) {
    extern __shared__ __align__(128) u8 shared[];
    auto& rows = *reinterpret_cast<KvRows<S::ROWS>*>(shared + S::ROWS_AT);
    KvWork work;
    wait_on_dependent_grids();
    if (!work.find(args)) return;
    const KvPlace place(shared);
    KvCopies<S> copies{args, work, place, args.cache + i64(work.head) * args.head_stride};
    {
        int pages[S::STAGES];  // all loads at once: pages, queries, keys and values
        KvQuery<S> query;
#pragma unroll
        for (int stage = 0; stage < S::STAGES; ++stage) pages[stage] = copies.page_of(work.begin + stage);
        query.load(args, work);
#pragma unroll
        for (int stage = 0; stage < S::STAGES - 1; ++stage) copies.fetch(work.begin + stage, stage, pages[stage]);
        copies.number = pages[S::STAGES - 1];
        rotate_queries<S>(query, args, rows, shared);
    }
    KvScores<S> scores(place, args, work, rows);
    scores.hold_queries();
    KvValues<S> values(place, rows);
    const int steps = work.end - work.begin;
    int stage = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const u32 slots = place.base + stage * S::STAGE_BYTES;
        cp_async_wait<S::STAGES - 2>();
        __syncwarp();
        scores.weigh(step, slots);
        __syncthreads();
        // Into the stage of the step before, which all have left.
        copies.fetch_next(work.begin + step + S::STAGES - 1, stage ? stage - 1 : S::STAGES - 1);
        values.add(scores, step, slots);
        stage = stage + 1 < S::STAGES ? stage + 1 : 0;
    }
    launch_dependent_grids();
    values.finish(scores);
}

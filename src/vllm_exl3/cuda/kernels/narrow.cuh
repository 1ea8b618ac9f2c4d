// The trellis GEMM for up to 16 tokens a tile: y = ((x·suh) H W H)·svh + bias, one launch a fused linear, or two.
//
// A warp multiplies J tile columns of its own; all warps of a block take the same k, so no sum crosses warps. Weights stream
// through each warp's ring; they are fetched before the kernel ahead has finished, since nothing ever writes them. Then the block
// rotates the activations of its own items (narrow_activations.cuh), or loads what a launch before it rotated, and multiplies.
#pragma once
#include "narrow_finish.cuh"
#include "narrow_ring.cuh"

// The launch's kinds of shards, and what shared memory holds for the largest of them.
template <class... Ks>
struct Kinds {
    static constexpr int tile_rows = (Ks::tile_rows, ...);  // the same for all
    // 2·K of all kinds, or 0 where they differ.
    static constexpr int half_bits() {
        int least = 1 << 30, most = 0;
        ((least = Ks::half_bits < least ? Ks::half_bits : least, most = Ks::half_bits > most ? Ks::half_bits : most), ...);
        return least == most ? most : 0;
    }
    static constexpr u32 slot_bytes(int tiles) {
        u32 most = 0;
        ((most = max_of(most, ITEM_TILES * (16 * tiles * Ks::half_bits + ROW_PAD))), ...);
        return most;
    }
    static constexpr u32 record_bytes() {
        u32 most = 0;
        ((most = max_of(most, Record<Ks::arithmetic, Ks::tile_rows>::bytes)), ...);
        return most;
    }

private:
    static constexpr u32 max_of(u32 a, u32 b) { return a > b ? a : b; }
};

// One block's state through its strips.
template <int J, int RING, class List>
struct NarrowBlock {
    static constexpr u32 slot_bytes = List::slot_bytes(J), ring_bytes = RING * slot_bytes, record_bytes = List::record_bytes();
    const NarrowArgs& args;
    u8* records;                    // kept items
    u32 kept_begin, kept_end, end;  // which; end of the block's range
    u32 ring_end, slot;             // shared addresses: behind the warp's ring, of the slot being read
    Cursor<J, List::half_bits()> cursor;
    u32 warp;
    int lane;

    __device__ __forceinline__ void start(u32 ring, u32 begin, u32 range_end) {
        end = range_end, kept_begin = kept_end = begin;
        cursor.item = begin, cursor.end = end, cursor.left = 0;
        cursor.seek(args, warp, lane);
        ring_end = ring + ring_bytes;
#pragma unroll 1
        for (slot = ring; slot != ring_end; slot += slot_bytes) cursor.fetch(args, slot, warp, lane);
        slot = ring;
    }
    __device__ __forceinline__ void next_slot() {
        __syncwarp();
        cursor.fetch(args, slot, warp, lane);
        slot += slot_bytes;
        if (slot == ring_end) slot -= ring_bytes;
    }
    // Makes sure of the activations of an item and, as far as there is room, those after it.
    template <class K>
    __device__ __forceinline__ void keep(u32 item, const NarrowShard& shard) {
        if (item < kept_end) return;
        constexpr u32 channels = WARPS * J * 16;
        const u32 shard_end = shard.first_item + (shard.out_features + channels - 1) / channels * (shard.in_features / BLOCK);
        __syncthreads();  // nobody reads the ones before any more
        kept_begin = item, kept_end = min(min(item + args.kept_items, end), shard_end);
        if (args.records != nullptr) load_items<record_bytes>(records, args, shard, kept_begin, kept_end);
        else rotate_items<K, record_bytes>(shared_address(records), args, shard, kept_begin, kept_end, warp, lane);
        __syncthreads();
    }
};

// Where a lane reads in a slot and in a record.
template <class K, int J>
struct LanePlaces {
    using R = Record<K::arithmetic, K::tile_rows>;
    static constexpr u32 tile_bytes = 4 * K::Window::tile_words, row_bytes = J * tile_bytes + ROW_PAD;
    u32 row, operand, start, undo;

    explicit __device__ __forceinline__ LanePlaces(int lane) {
        row = kept_value((lane & 3) * row_bytes), operand = kept_value(16 * lane);
        start = kept_value(R::starts_at + (lane & 3) * 16);
        undo = kept_value(R::undo_at + LaneTokens<K>::token_of(0, 0, lane) * 4);
    }
};

// A warp's part of one item.
template <class K, int J>
__device__ __forceinline__ void multiply_item(Totals<K> (&totals)[J], u32 slot, u32 record, const LanePlaces<K, J>& places, int lane) {
    using W = typename K::Window;
    using P = LanePlaces<K, J>;
    const u32 row = slot + places.row;
    LaneTokens<K> tokens;
    tokens.load(record + places.start, record + places.undo);
    ItemSum<K> sums[J][K::columns][4];
    u32 words[2][W::words];
    const auto load_step = [&](int step) {  // unit step / J, tile step % J
        load_words<K::half_bits>(words[step % 2], SharedWords{row + step / J * 4 * P::row_bytes + step % J * P::tile_bytes}, lane);
    };
    load_step(0);
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
        Operand<K> operand(record + places.operand + unit * P::R::unit_bytes);
#pragma unroll
        for (int tile = 0; tile < J; ++tile) {
            const int step = unit * J + tile;
            if (step + 1 < 2 * J) load_step(step + 1);
            multiply_unit<K>(sums[tile], unit == 0 ? tokens.start : sums[tile], words[step % 2], operand);
            if (unit == 1) add_item<K>(totals[tile], sums[tile], tokens);
        }
    }
}

// The items [begin, end) of one strip.
template <class K, int J, int RING, class List>
__device__ __forceinline__ void multiply_strip(NarrowBlock<J, RING, List>& block, const Strip& strip, u32 begin, u32 end) {
    const NarrowArgs& args = block.args;
    const NarrowShard& shard = args.shards[strip.shard];
    const LanePlaces<K, J> places(block.lane);
    const bool columns = strip.channel + block.warp * J * 16 < shard.out_features;
    Totals<K> totals[J] = {};
    for (u32 item = begin; item < end;) {
        block.template keep<K>(item, shard);
        u32 record = kept_value(shared_address(block.records) + (item - block.kept_begin) * block.record_bytes);
        const u32 stop = min(end, block.kept_end);
        u32 left = kept_value(stop - item);
        if (columns) {
            for (; left; --left) {
                wait_for_fetch<RING - 1>();
                multiply_item<K, J>(totals, block.slot, record, places, block.lane);
                record += block.record_bytes;
                block.next_slot();
            }
        } else {
#pragma unroll 1
            for (; left; --left) block.next_slot();
        }
        item = stop;
    }
    if (columns) store_piece<K, J>(args, totals, strip, block.warp, block.lane);
}

template <int J, int RING, class List, class... Ks>
__device__ __forceinline__ void dispatch(Kinds<Ks...>, u32 kind, NarrowBlock<J, RING, List>& block, const Strip& strip, u32 begin, u32 end) {
    u32 index = 0;
    ((index++ == kind ? multiply_strip<Ks>(block, strip, begin, end) : void()), ...);
}

template <int J, int RING, class List>
__device__ __forceinline__ void narrow(const NarrowArgs& args) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ SharedStrip ends_memory[2];
    using Block = NarrowBlock<J, RING, List>;
    // The warp's index is made uniform, so that everything derived from it is computed once a warp.
    const u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const u32 begin = range_begin(args, blockIdx.x), end = range_end(args, blockIdx.x);

    // Shared memory: the warps' rings, then the kept items' records.
    Block block{args};
    StripEnds ends{ends_memory};
    const int lane = threadIdx.x & 31;
    block.warp = warp, block.lane = lane;
    block.records = memory + WARPS * Block::ring_bytes;

    // Weights never change: they are fetched before the kernel ahead has finished. All else waits for it.
    block.start(shared_address(memory) + warp * Block::ring_bytes, begin, end);
    let_next_start();
    wait_for_previous();

    Strip strip{};
    for (u32 at = begin; at < end;) {
        while (strip.shard + 1 < args.shard_count && at >= args.shards[strip.shard + 1].first_item) ++strip.shard;
        const NarrowShard& shard = args.shards[strip.shard];
        const u32 depth = shard.in_features / BLOCK, local = (at - shard.first_item) / depth;
        strip.index = shard.first_strip + local, strip.channel = local * WARPS * J * 16;
        strip.first_item = shard.first_item + local * depth, strip.end_item = strip.first_item + depth;
        const u32 piece_end = min(end, strip.end_item);
        dispatch(List{}, shard.kind, block, strip, at, piece_end);
        ends.add<J, List::tile_rows>(args, strip, warp, lane);
        at = piece_end;
    }
    ends.finish<J, List::tile_rows>(args, warp, lane);
}

// One record of every token of a row tile; grid (records, row tiles).
template <class... Ks>
__device__ __forceinline__ void rotate(Kinds<Ks...> kinds, const NarrowArgs& args) {
    constexpr u32 record_bytes = kinds.record_bytes();
    __shared__ __align__(16) u8 record[record_bytes];
    const u32 warp = threadIdx.x / 32;
    u32 index = 0;
    let_next_start();
    wait_for_previous();
    if (gridDim.y > 1)  // the counters of several row tiles are scratch that nobody has cleared
        for (u32 i = (blockIdx.y * gridDim.x + blockIdx.x) * THREADS + threadIdx.x; i < args.total_strips * gridDim.y;
             i += gridDim.x * gridDim.y * THREADS)
            args.counters[i] = 0;
    while (index + 1 < args.shard_count && blockIdx.x >= args.shards[index + 1].first_record) ++index;
    const NarrowShard& shard = args.shards[index];
    const u32 item = shard.first_item + blockIdx.x - shard.first_record;
    u32 number = 0;
    ((number++ == shard.kind ? rotate_items<Ks, record_bytes>(shared_address(record), args, shard, item, item + 1, warp, threadIdx.x & 31)
                             : void()), ...);
    __syncthreads();
    uint4* target = const_cast<uint4*>(args.records) +
        (static_cast<u64>(blockIdx.y) * args.total_records + blockIdx.x) * (record_bytes / 16);
    for (u32 chunk = threadIdx.x; chunk < record_bytes / 16; chunk += THREADS) target[chunk] = reinterpret_cast<const uint4*>(record)[chunk];
}

// Decoding over the int4 KV cache on the host, behind one function for ctypes.
#include "ptx.h"
#include "kv/decode.cuh"
#include "kv/merge.cuh"

template <int SIZE, int TILES, int STAGES, int CHUNK, bool HELD>
void decode(const KvDecodeArgs& args, u32 blocks) {
    using Shape = KvShape<SIZE, TILES, STAGES, CHUNK, HELD>;
    launch(blocks, 1, KV_THREADS, kv_shared_bytes<Shape>(), [=] { kv_decode<Shape>(args); });
}

template <int SIZE>
void merge(const KvMergeArgs& args, u32 blocks) {
    launch(blocks, 1, KV_MERGE_THREADS, 4 * KV_MERGE_WARPS * SIZE + sizeof(KvSegments), [=] { kv_merge<SIZE>(args); });
}

// `kernel` as test_kv_host.py numbers them.
extern "C" void run_kv(const KvDecodeArgs* args, int kernel, u32 blocks) {
    switch (kernel) {
        case 0: return decode<64, 1, 3, 16, true>(*args, blocks);
        case 1: return decode<64, 3, 2, 8, false>(*args, blocks);
        case 2: return decode<128, 2, 3, 16, false>(*args, blocks);
        case 3: return decode<256, 1, 3, 16, true>(*args, blocks);
        case 4: return decode<256, 4, 2, 8, false>(*args, blocks);
        case 5: return decode<512, 1, 3, 16, false>(*args, blocks);
        case 6: return decode<512, 2, 2, 8, false>(*args, blocks);
    }
    fail("no such kernel");
}

extern "C" void run_kv_merge(const KvMergeArgs* args, int size, u32 blocks) {
    switch (size) {
        case 64: return merge<64>(*args, blocks);
        case 128: return merge<128>(*args, blocks);
        case 256: return merge<256>(*args, blocks);
        case 512: return merge<512>(*args, blocks);
    }
    fail("no such size");
}

// One instance of decoding over the int4 KV cache.
//
// The caller defines INSTANCE_SIZE, INSTANCE_TILES, INSTANCE_STAGES, INSTANCE_CHUNK, INSTANCE_HELD and INSTANCE_BLOCKS (of a
// multiprocessor, which sets the registers).
#include "kv/decode.cuh"

extern "C" __global__ void __launch_bounds__(KV_THREADS, INSTANCE_BLOCKS) exl3_kv_decode(const __grid_constant__ KvDecodeArgs args) {
    kv_decode<KvShape<INSTANCE_SIZE, INSTANCE_TILES, INSTANCE_STAGES, INSTANCE_CHUNK, INSTANCE_HELD>>(args);
}

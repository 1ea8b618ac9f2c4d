#include "share.h"

#include <math.h>
#include <string.h>

namespace exl3 {
namespace {

exl3_share_driver driver;

template <class Id>
void number(const exl3_share& share, int64_t count) {
    const Id* routed = static_cast<const Id*>(share.routed_ids);
    int32_t* ids = share.ids;
    for (int64_t i = 0; i < count; i++) {
        const int64_t id = routed[i];
        ids[i] = id >= 0 && id < share.local_size ? share.local[id] : -1;
    }
}

// What a stream runs. It may not call CUDA, and nobody sees a return value: a failure is kept, and the reply made useless.
void run(void* data) {
    exl3_share& share = *static_cast<exl3_share*>(data);
    const exl3_moe_call& call = share.call;
    const int64_t count = call.tokens * call.top_k;
    if (share.routed_id_bytes == 8)
        number<int64_t>(share, count);
    else
        number<int32_t>(share, count);
    const int status = exl3_moe(&call);
    if (status) {
        share.status = status;
        float* out = static_cast<float*>(call.out);
        for (int64_t i = 0; i < call.tokens * call.out_stride; i++) out[i] = NAN;
    }
    share.runs++;
}

int copy(uint64_t target, uint64_t source, uint64_t bytes, void* stream) { return driver.copy(target, source, bytes, stream); }

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

int enqueue(const exl3_share_launch& launch) {
    exl3_share& share = *launch.share;
    const exl3_moe_call& call = share.call;
    const uint64_t slots = call.tokens * call.top_k, values = call.tokens * call.hidden;
    const uint64_t element = call.dtype == 0 ? 4 : 2;
    int status = driver.record(launch.ready, launch.stream);
    if (!status) status = driver.wait(launch.side, launch.ready, 0);
    if (!status) status = copy(address(call.x), launch.x, values * element, launch.side);
    if (!status) status = copy(address(share.routed_ids), launch.ids, slots * share.routed_id_bytes, launch.side);
    if (!status) status = copy(address(call.weights), launch.weights, slots * 4, launch.side);
    if (!status) status = driver.host_function(launch.side, run, &share);
    if (!status) status = copy(launch.reply, address(call.out), values * 4, launch.side);
    if (!status) status = driver.record(launch.done, launch.side);
    return status;
}

}  // namespace

void set_share_driver(const exl3_share_driver& functions) { driver = functions; }

int enqueue_share(const exl3_share_launch& launch) {
    if (!driver.copy || !driver.host_function || !driver.record || !driver.wait || !driver.get_context || !driver.push_context ||
        !driver.pop_context)
        return EXL3_BAD_PROGRAM;
    void* context = nullptr;
    if (int status = driver.get_context(&context)) return status;
    const bool other = context != launch.context;
    if (other) {
        if (int status = driver.push_context(launch.context)) return status;
    }
    const int status = enqueue(launch);
    if (other) driver.pop_context(&context);
    return status;
}

}  // namespace exl3

// Preloaded before the library: what its calls are found by when they do wrong. FAULT says which wrong.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "../../csrc/cpu/abi.h"

namespace {

bool fault(const char* name) {
    const char* const wanted = std::getenv("FAULT");
    return wanted && !std::strcmp(wanted, name);
}

template <class Function>
Function original(const char* name) {
    void* const address = dlsym(RTLD_NEXT, name);
    Function function;
    std::memcpy(&function, &address, sizeof address);
    return function;
}

}  // namespace

EXL3_API int exl3_gather_rows(const exl3_row_call* call) {
    static const auto real = original<int (*)(const exl3_row_call*)>("exl3_gather_rows");
    const int64_t bytes = call->count * call->width * (call->dtype == 0 ? 4 : 2);
    const bool depends = fault("depends on what was there") && call->out && call->width > 0 && call->width < 1000 && call->count > 0;
    const int before = depends ? static_cast<const uint8_t*>(call->out)[bytes - 1] : 0;
    const int code = real(call);
    if (code && fault("accepts")) return 0;
    if (code || !bytes) return code;
    auto* const out = static_cast<uint8_t*>(call->out);
    if (fault("writes beyond")) out[bytes] = 1;
    if (fault("writes before")) out[-1] = 1;
    if (fault("reads beyond") && static_cast<const volatile uint8_t*>(call->out)[bytes] == 1) return 1;
    if (depends) out[bytes - 1] = uint8_t(before);
    if (fault("refuses")) return 5;
    return code;
}

EXL3_API int exl3_linear(const exl3_linear_call* call) {
    static const auto real = original<int (*)(const exl3_linear_call*)>("exl3_linear");
    const int code = real(call);
    int64_t columns = 0;
    for (int i = 0; !code && i < call->shard_count; i++) columns += call->shards[i].crop_size;
    if (code || !call->rows || !columns) return code;
    auto* const y = static_cast<uint8_t*>(call->y);
    const int64_t width = call->dtype == 0 ? 4 : 2;
    if (fault("writes between rows") && call->rows > 1 && call->y_stride > columns) y[columns * width] = 7;
    if (fault("differs by instruction set") && std::string(exl3_isa()) != "scalar") y[width - 1] ^= 0x80;
    return code;
}

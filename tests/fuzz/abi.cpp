// Calls the library's C interface (csrc/cpu/abi.h) with arguments that the fuzzer's bytes decide. Every buffer is as large
// as the interface says and no larger. A call that the interface allows must return 0 and give equal bits whatever lay in
// the output before; another must return a code.
//
// Links with libFuzzer, or with abi_random.cpp, whose inputs are random.
#include "abi_input.h"

namespace {

const char* const SETS[] = {"auto",        "scalar",      "avx2",         "avx2_vnni",   "avx512",
                            "avx512_vnni", "avx512_vbmi", "avx512_words", "avx512_fp16", "amx"};

// In place of an OpenMP runtime: the members of a team one after the other, or fewer of them than were asked for.
void parallel_in_turn(void (*function)(void*), void* data, unsigned threads, unsigned) {
    for (unsigned i = 0; i < (threads > 3 ? threads - 1 : threads); i++) function(data);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    abi::Input input(data, size);
    // One after the other wherever this processor has them; what it has not is refused and changes nothing.
    // The portable kernels take twenty times as long under sanitizers.
    exl3_select_isa(input.once_in(64) ? SETS[1] : SETS[(2 + input.below(9)) % 10]);
    exl3_set_openmp(input.once_in(256) ? nullptr : reinterpret_cast<void*>(parallel_in_turn));
    // An encoder's call takes as long as ten thousand others: a hash of the input lets few in.
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < size; i++) hash = (hash ^ data[i]) * 16777619u;
    if ((hash >> 8) % 100000 == 0) {
        if (!std::strcmp(exl3_isa(), "scalar")) exl3_select_isa("auto");  // a minute of it otherwise
        abi::call_encode(input, true);
        return 0;
    }
    const int64_t choice = input.below(64);
    if (choice < 1) {
        abi::call_dequantize(input);
    } else if (choice < 4) {
        abi::call_encode(input, false);
    } else if (choice < 12) {
        abi::call_small(input);
    } else if (choice < 20) {
        abi::call_hadamard(input);
    } else if (choice < 32) {
        abi::call_launch(input);
    } else if (choice < 48) {
        abi::call_gather(input);
    } else if (choice < 52) {
        abi::call_moe(input);
    } else {
        abi::call_linear(input);
    }
    return 0;
}

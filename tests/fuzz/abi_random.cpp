// The loop around abi.cpp without libFuzzer: inputs of random bytes, each by its number, so that a seed and a range of numbers
// say what was called.
//
//     abi SEED FIRST COUNT
#include <csignal>
#include <unistd.h>

#include "abi_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

uint64_t mixed(uint64_t value) {  // splitmix64
    value += 0x9E3779B97F4A7C15u;
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
    value = (value ^ value >> 27) * 0x94D049BB133111EBu;
    return value ^ value >> 31;
}

void report(int) {
    char text[64];
    const int size = std::snprintf(text, sizeof text, "FOUND: a signal in input %llu\n",
                                   static_cast<unsigned long long>(abi::input_number));
    if (write(2, text, size_t(size)) < 0) _exit(3);
    _exit(1);
}

}  // namespace

#if EXL3_SANITIZED
extern "C" void __sanitizer_set_death_callback(void (*callback)());
#endif

int main(int count, char** arguments) {
    if (count != 4) return 2;
    const uint64_t seed = std::strtoull(arguments[1], nullptr, 10), first = std::strtoull(arguments[2], nullptr, 10);
    const uint64_t number = std::strtoull(arguments[3], nullptr, 10);
#if EXL3_SANITIZED
    __sanitizer_set_death_callback([] {
        std::fprintf(stderr, "FOUND: a sanitizer's report in input %llu\n",
                     static_cast<unsigned long long>(abi::input_number));
    });
#else
    std::signal(SIGSEGV, report);
    std::signal(SIGBUS, report);
    std::signal(SIGILL, report);
    std::signal(SIGABRT, report);
#endif
    uint64_t bytes[28];
    for (abi::input_number = first; abi::input_number < first + number; abi::input_number++) {
        uint64_t state = mixed(seed) ^ abi::input_number * 0xD1342543DE82EF95u;
        for (uint64_t& word : bytes) word = state = mixed(state);
        LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes), sizeof bytes);
    }
    std::printf("Done %llu runs\n", static_cast<unsigned long long>(number));
}

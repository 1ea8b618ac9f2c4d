// The loop around abi.cpp where there is no libFuzzer: inputs of random bytes, each by its number.
//
//     abi FIRST COUNT
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int count, char** arguments) {
    if (count != 3) return 2;
    const unsigned long long first = std::strtoull(arguments[1], nullptr, 10);
    const unsigned long long number = std::strtoull(arguments[2], nullptr, 10);
    std::vector<uint8_t> bytes;
    for (unsigned long long input = first; input < first + number; input++) {
        std::mt19937 random(static_cast<uint32_t>(input));
        bytes.resize(16 + random() % 112);
        for (uint8_t& byte : bytes) byte = uint8_t(random() >> 24);
        LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    }
    std::printf("Done %llu runs\n", number);
}

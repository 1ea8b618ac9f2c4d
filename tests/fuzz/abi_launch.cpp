// Calls of exl3_launch with functions that stand in for the driver's and compare what they are passed, and of the functions
// that compute nothing.
#include <string>
#include <vector>

#include "abi_input.h"

namespace abi {
namespace {

// CUlaunchConfig and CUlaunchAttribute of CUDA's cuda.h.
struct Attribute {
    int id, padding;
    unsigned value[16];
};
struct Config {
    unsigned grid[3], block[3], shared;
    void* stream;
    Attribute* attributes;
    unsigned attribute_count;
};

// What the driver is to see of a program, and which of its functions fails.
struct Expected {
    const exl3_program* program;
    std::vector<uint8_t> arguments;
    void *stream, *current;
    int64_t fails;  // 0 none, 1 the context, 2 the push, 3 and more: the launch of that kernel
    uint32_t launched;
    int pushed, popped;
} expected;

constexpr int STATUS = 700;

int launch_kernel(const Config* config, void* function, void** parameters, void** extra) {
    const exl3_kernel& kernel = expected.program->kernels[expected.launched++];
    bool equal = config->grid[0] == kernel.grid_x && config->grid[1] == kernel.grid_y && config->grid[2] == 1;
    equal &= config->block[0] == kernel.threads && config->block[1] == 1 && config->block[2] == 1;
    equal &= config->shared == kernel.shared_bytes && config->stream == expected.stream && function == kernel.function;
    equal &= config->attribute_count == unsigned(kernel.dependent != 0) + unsigned(kernel.cluster > 1) && !extra;
    unsigned at = 0;
    if (kernel.dependent) {
        equal &= config->attributes[at].id == 6 && config->attributes[at].value[0] == 1;
        at++;
    }
    if (kernel.cluster > 1) {
        const Attribute& cluster = config->attributes[at];
        equal &= cluster.id == 4 && cluster.value[0] == kernel.cluster && cluster.value[1] == 1 && cluster.value[2] == 1;
    }
    const auto& wanted = expected.arguments;
    equal &= wanted.empty() || !std::memcmp(parameters[0], wanted.data(), wanted.size());
    if (!equal) fail("what the driver is passed", expected.launched);
    return expected.fails == 2 + int64_t(expected.launched) ? STATUS : 0;
}

int get_context(void** context) {
    *context = expected.current;
    return expected.fails == 1 ? STATUS : 0;
}

int push_context(void* context) {
    if (context != expected.program->context) fail("the context", -1);
    expected.pushed += expected.fails != 2;
    return expected.fails == 2 ? STATUS : 0;
}

int pop_context(void** context) {
    *context = expected.program->context;
    expected.popped++;
    return 0;
}

void install(bool all, int64_t without) {
    void* functions[] = {reinterpret_cast<void*>(launch_kernel), reinterpret_cast<void*>(get_context),
                         reinterpret_cast<void*>(push_context), reinterpret_cast<void*>(pop_context)};
    if (!all) functions[without] = nullptr;
    exl3_set_driver(functions[0], functions[1], functions[2], functions[3]);
}

}  // namespace

void call_launch(Input& input) {
    static const int64_t sizes[] = {0, 1, 7, 8, 9, 64, 200, 4095, 4096};
    static const int64_t too_many[] = {4097, 1 << 20, UINT32_MAX};
    const bool refused = input.once_in(4);
    const int64_t fault = refused ? 1 + input.below(4) : 0;  // too many bytes, a patch beyond them, its value, the driver
    const int64_t bytes = input.any(sizes);
    const Buffer arguments(input, bytes);
    std::vector<exl3_patch> patches(bytes < 8 ? 0 : size_t(input.below(12)));
    for (exl3_patch& patch : patches) {
        patch = {uint32_t(input.below(bytes - 7)), uint32_t(input.below(EXL3_VALUE_COUNT)), uint64_t(input.below(1 << 16))};
        if (input.once_in(8)) patch.at = uint32_t(bytes - 8);
        if (input.once_in(8)) patch.addend = ~patch.addend;
    }
    static const int64_t beyond[] = {1, 8, int64_t(1) << 31};
    if (fault == 2 || fault == 3) patches.push_back({uint32_t(bytes < 8 ? 0 : bytes - 8), 0, 0});
    if (fault == 2) patches.back().at = uint32_t(bytes < 8 ? input.below(9) : bytes - 8 + input.any(beyond));
    if (fault == 3) patches.back().value = uint32_t(EXL3_VALUE_COUNT - 1 + input.any(beyond));
    std::vector<exl3_kernel> kernels(size_t(input.below(4)));
    for (exl3_kernel& kernel : kernels) {
        kernel = {&kernel, uint32_t(input.below(1 << 16)), uint32_t(input.below(1 << 16)), uint32_t(input.below(1025)),
                  uint32_t(input.below(1 << 16)), uint32_t(input.below(9)), uint32_t(input.below(2))};
    }
    int contexts[2];
    exl3_program program{};
    program.arguments = arguments.get(), program.patches = patches.data(), program.kernels = kernels.data();
    program.context = &contexts[0];
    program.argument_bytes = uint32_t(fault == 1 ? input.any(too_many) : bytes);
    program.patch_count = uint32_t(patches.size()), program.kernel_count = uint32_t(kernels.size());
    uint64_t values[EXL3_VALUE_COUNT];
    input.fill(reinterpret_cast<uint8_t*>(values), sizeof values);
    expected = {&program, {}, &values, &contexts[input.below(2)], input.once_in(4) ? 1 + input.below(5) : 0, 0, 0, 0};
    if (!refused) {
        expected.arguments.assign(arguments.get(), arguments.get() + bytes);
        for (const exl3_patch& patch : patches) {
            const uint64_t value = values[patch.value] + patch.addend;
            std::memcpy(&expected.arguments[patch.at], &value, 8);
        }
    }
    install(fault != 4, input.below(4));
    const int status = exl3_launch(&program, values[0], values[1], values[2], values[3], values[4], values[5], values[6],
                                   values[7], values[8], values[9], expected.stream);
    const bool other = expected.current != program.context;
    const uint32_t last = expected.fails > 2 ? uint32_t(expected.fails - 2) : UINT32_MAX;
    const bool stopped = expected.fails == 1 || (expected.fails == 2 && other);
    const bool failing = stopped || last <= program.kernel_count;
    (refused || failing ? record.refused : record.computed)[LAUNCH]++;
    if (refused ? status != EXL3_BAD_PROGRAM : status != (failing ? STATUS : 0)) fail("exl3_launch", status);
    const uint32_t launches = refused || stopped ? 0 : std::min(program.kernel_count, last);
    if (expected.launched != launches) fail("launches", expected.launched);
    if (expected.pushed != expected.popped || (expected.pushed && !other)) fail("a context left behind", expected.pushed);
    if (refused && expected.pushed) fail("a context for a program that is none", expected.pushed);
}

void call_small(Input& input) {
    static const char* const names[] = {"",     "AUTO",  "scalar ", " avx2",    "avx512_", "none",
                                        "AMX ", "auto ", "sca",     "avx2_vnn", "%s%n",    "avx512_vbmi2"};
    const std::string before = exl3_isa();
    if (input.once_in(2)) {
        const std::string name = input.once_in(8) ? std::string(size_t(input.below(5000)), 'a') : names[input.below(12)];
        const int code = exl3_select_isa(name.c_str());
        record.refused[SMALL]++;
        if (code != 3 || before != exl3_isa()) fail("exl3_select_isa", code);
        return;
    }
    const int64_t codes[] = {input.below(256) - 128, INT32_MAX, INT32_MIN, EXL3_BAD_PROGRAM};
    const int code = int(input.any(codes));
    const std::string text = exl3_error_text(code);
    record.computed[SMALL]++;
    const bool unknown = (code < 0 || code > 14) && code != EXL3_BAD_PROGRAM;
    if (text.empty() || unknown != (text == "unknown error")) fail("exl3_error_text", code);
    if (exl3_abi_version() != EXL3_ABI_VERSION) fail("exl3_abi_version", exl3_abi_version());
}

}  // namespace abi

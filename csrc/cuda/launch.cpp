#include "launch.h"

#include <string.h>

#include <atomic>
#include <new>

namespace exl3 {
namespace {

// CUlaunchAttribute: the value is a union of 64 bytes, behind a number that is padded to eight.
struct Attribute {
    enum : int { CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
    int id, padding;
    union {
        char bytes[64];
        unsigned cluster[3];
        int allowed;
    };
};

// CUlaunchConfig.
struct Config {
    unsigned grid[3], block[3], shared;
    void* stream;
    Attribute* attributes;
    unsigned attribute_count;
};

struct Driver {
    int (*launch_kernel)(const Config*, void* function, void** parameters, void** extra);
    int (*get_context)(void** context);
    int (*push_context)(void* context);
    int (*pop_context)(void** context);

    bool complete() const { return launch_kernel && get_context && push_context && pop_context; }
};

// Replaced as a whole, and never freed: another thread may be launching by it. A process sets it once.
std::atomic<const Driver*> current_driver{nullptr};

bool valid(const exl3_program& program) {
    if (program.argument_bytes > EXL3_ARGUMENT_BYTES || (program.argument_bytes && !program.arguments)) return false;
    if ((program.patch_count && !program.patches) || (program.kernel_count && !program.kernels)) return false;
    for (uint32_t i = 0; i < program.kernel_count; i++)
        if (!program.kernels[i].function) return false;
    for (uint32_t i = 0; i < program.patch_count; i++) {
        const exl3_patch& patch = program.patches[i];
        if (patch.value >= EXL3_VALUE_COUNT) return false;
        if (patch.at > program.argument_bytes || program.argument_bytes - patch.at < sizeof(uint64_t)) return false;
    }
    return true;
}

int launch_kernel(const Driver& driver, const exl3_kernel& kernel, void* arguments, void* stream) {
    Attribute attributes[2];
    memset(attributes, 0, sizeof(attributes));
    Config config = {
        {kernel.grid_x, kernel.grid_y, 1}, {kernel.threads, 1, 1}, kernel.shared_bytes, stream, attributes, 0};
    if (kernel.dependent) {
        Attribute& attribute = attributes[config.attribute_count++];
        attribute.id = Attribute::PROGRAMMATIC_STREAM_SERIALIZATION, attribute.allowed = 1;
    }
    if (kernel.cluster > 1) {
        Attribute& attribute = attributes[config.attribute_count++];
        attribute.id = Attribute::CLUSTER_DIMENSION;
        attribute.cluster[0] = kernel.cluster, attribute.cluster[1] = attribute.cluster[2] = 1;
    }
    void* parameters[] = {arguments};
    return driver.launch_kernel(&config, kernel.function, parameters, nullptr);
}

}  // namespace

void set_driver(void* launch_kernel, void* get_context, void* push_context, void* pop_context) {
    static_assert(sizeof(Driver) == 4 * sizeof(void*), "addresses, one after the other");
    void* const addresses[] = {launch_kernel, get_context, push_context, pop_context};
    Driver* const driver = new (std::nothrow) Driver;
    if (driver) memcpy(driver, addresses, sizeof(addresses));
    current_driver.store(driver, std::memory_order_release);
}

int launch(const exl3_program& program, const uint64_t* values, void* stream) {
    const Driver* const found = current_driver.load(std::memory_order_acquire);
    if (!found || !found->complete() || !valid(program)) return EXL3_BAD_PROGRAM;
    const Driver& driver = *found;
    alignas(16) uint8_t arguments[EXL3_ARGUMENT_BYTES];
    memcpy(arguments, program.arguments, program.argument_bytes);
    for (uint32_t i = 0; i < program.patch_count; i++) {
        const exl3_patch& patch = program.patches[i];
        const uint64_t value = values[patch.value] + patch.addend;
        memcpy(arguments + patch.at, &value, sizeof(value));
    }
    // The handle of a default stream means that of the current context, which may be another device's.
    void* context = nullptr;
    if (int status = driver.get_context(&context)) return status;
    const bool other = context != program.context;
    if (other) {
        if (int status = driver.push_context(program.context)) return status;
    }
    int status = 0;
    for (uint32_t i = 0; i < program.kernel_count && status == 0; i++)
        status = launch_kernel(driver, program.kernels[i], arguments, stream);
    if (other) driver.pop_context(&context);
    return status;
}

}  // namespace exl3

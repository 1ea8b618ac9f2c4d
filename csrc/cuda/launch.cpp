#include "launch.h"

#include <string.h>

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
} driver;

bool valid(const exl3_program& program) {
    if (!driver.launch_kernel || !driver.get_context || !driver.push_context || !driver.pop_context) return false;
    if (program.argument_bytes > EXL3_ARGUMENT_BYTES) return false;
    for (uint32_t i = 0; i < program.patch_count; i++) {
        const exl3_patch& patch = program.patches[i];
        if (patch.value >= EXL3_VALUE_COUNT) return false;
        if (patch.at > program.argument_bytes || program.argument_bytes - patch.at < sizeof(uint64_t)) return false;
    }
    return true;
}

int launch_kernel(const exl3_kernel& kernel, void* arguments, void* stream) {
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
    memcpy(&driver.launch_kernel, &launch_kernel, sizeof(void*));
    memcpy(&driver.get_context, &get_context, sizeof(void*));
    memcpy(&driver.push_context, &push_context, sizeof(void*));
    memcpy(&driver.pop_context, &pop_context, sizeof(void*));
}

int launch(const exl3_program& program, const uint64_t* values, void* stream) {
    if (!valid(program)) return EXL3_BAD_PROGRAM;
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
        status = launch_kernel(program.kernels[i], arguments, stream);
    if (other) driver.pop_context(&context);
    return status;
}

}  // namespace exl3

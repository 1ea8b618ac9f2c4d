#include "isa.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#endif
#if defined(EXL3_AMX) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace exl3 {
namespace {

struct Candidate {
    const Kernels* kernels;
    bool (*runs)();
    bool (*suits)() = [] { return true; };  // whether "auto" takes it where it runs
};

#if defined(__x86_64__) || defined(_M_X64)
// clang 14 does not know the name "f16c".
bool has_f16c() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx >> 29 & 1);
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }
#ifdef EXL3_AVX_VNNI
bool has_avx2_vnni() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}
#endif
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_vbmi() {
    return has_vnni() && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
}
// AMD's multiply dwords in one instruction and cut windows on multipliers' pipes, others the reverse.
bool multiplies_words_faster() { return !__builtin_cpu_is("amd"); }
#ifdef EXL3_AVX512_FP16
bool has_fp16() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return has_vbmi() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx >> 23 & 1);
}
#endif
#ifdef EXL3_AMX
bool has_amx() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    constexpr unsigned tiles_and_int8 = 3u << 24;
    if (!has_fp16() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    if ((edx & tiles_and_int8) != tiles_and_int8) return false;
#if defined(__linux__)
    // A process has to ask for the tiles' state before it uses them; the kernel may refuse.
    constexpr long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}
#endif
#endif

// Best first.
const Candidate candidates[] = {
#if defined(__x86_64__) || defined(_M_X64)
#ifdef EXL3_AMX
    {&kernels_amx, has_amx},
#endif
#ifdef EXL3_AVX512_FP16
    {&kernels_avx512_fp16, has_fp16},
#endif
    {&kernels_avx512_words, has_vbmi, multiplies_words_faster},
    {&kernels_avx512_vbmi, has_vbmi},
    {&kernels_avx512_vnni, has_vnni},
    {&kernels_avx512, has_avx512},
#ifdef EXL3_AVX_VNNI
    {&kernels_avx2_vnni, has_avx2_vnni},
#endif
    {&kernels_avx2, has_avx2},
#elif defined(__aarch64__)
    {&kernels_neon, [] { return true; }},
#endif
    {&kernels_scalar, [] { return true; }},
};

const Kernels* find(const char* name) {
    for (const Candidate& candidate : candidates) {
        const bool automatic = !std::strcmp(name, "auto");
        const bool wanted = automatic ? candidate.suits() : !std::strcmp(name, candidate.kernels->name);
        if (wanted && candidate.runs()) return candidate.kernels;
    }
    return nullptr;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
    const Kernels* current = chosen.load(std::memory_order_relaxed);
    if (!current) chosen.store(current = find("auto"));
    return *current;
}

bool select_kernels(const char* name) {
    const Kernels* found = find(name);
    if (found) chosen.store(found);
    return found != nullptr;
}

}  // namespace exl3

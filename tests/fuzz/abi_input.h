// What the generators of calls at the C interface share: numbers from a fuzzer's bytes, buffers that end where the interface
// says, and the record of what was called.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "../../csrc/cpu/abi.h"

#if defined(__SANITIZE_ADDRESS__)
#define EXL3_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EXL3_SANITIZED 1
#endif
#endif
#ifndef EXL3_SANITIZED
#define EXL3_SANITIZED 0
#endif

namespace abi {

enum Function { LINEAR, DEQUANTIZE, HADAMARD, ENCODE, GATHER, MOE, LAUNCH, SMALL, FUNCTION_COUNT };

// Calls by function; each process prints them when it ends, for the campaign's record.
struct Record {
    int64_t computed[FUNCTION_COUNT] = {}, refused[FUNCTION_COUNT] = {}, compared[FUNCTION_COUNT] = {};
    ~Record() {
        static const char* const names[] = {"linear",      "dequantize", "hadamard", "encode",
                                            "gather_rows", "moe",        "launch",   "small"};
        for (int i = 0; i < FUNCTION_COUNT; i++)
            std::printf("CALLS %s %lld %lld %lld\n", names[i], static_cast<long long>(computed[i]),
                        static_cast<long long>(refused[i]), static_cast<long long>(compared[i]));
    }
};
inline Record record;
inline uint64_t input_number = 0;  // of the input that runs, which a report names

[[noreturn]] inline void fail(const char* what, int64_t found) {
    std::fprintf(stderr, "FOUND: %s (%lld) in input %llu under %s\n", what, static_cast<long long>(found),
                 static_cast<unsigned long long>(input_number), exl3_isa());
    std::abort();
}

// The fuzzer's bytes as numbers; zeros once they are used up.
class Input {
   public:
    Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

    int64_t below(int64_t count) {
        const int64_t high = next();
        return (high << 8 | next()) % count;
    }
    bool once_in(int64_t count) { return below(count) == count - 1; }
    template <size_t N>
    int64_t any(const int64_t (&values)[N]) {
        return values[below(N)];
    }
    // The rest of the input over and over, or words that it decides.
    void fill(uint8_t* buffer, size_t size) {
        const uint64_t kind = uint64_t(next());
        const size_t left = size_ - at_;
        if (kind % 4 == 0) {
            const size_t own = std::min(left, size);
            if (!own) std::fill_n(buffer, size, uint8_t(0));
            if (own) std::copy_n(data_ + at_, own, buffer);
            for (size_t done = own; own && done < size; done *= 2)
                std::copy_n(buffer, std::min(done, size - done), buffer + done);
            return;
        }
        uint64_t state = (kind << 32 | left) * 0x9E3779B97F4A7C15u + 1;
        for (size_t i = 0; i < size; i += 8) {
            state ^= state << 13, state ^= state >> 7, state ^= state << 17;
            std::memcpy(buffer + i, &state, std::min<size_t>(8, size - i));
        }
    }

   private:
    int next() { return at_ < size_ ? data_[at_++] : 0; }

    const uint8_t* data_;
    size_t size_, at_ = 0;
};

// Places for buffers between two pages that may not be touched: what AddressSanitizer does not see (inline assembly, loads
// of tiles, a library built without it) ends the process there.
class Pages {
   public:
    static constexpr size_t SIZE = size_t(1) << 20, PAGE = 4096, COUNT = 12;

    Pages() {
        for (uint8_t*& place : places_) {
            void* all = mmap(nullptr, SIZE + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (all == MAP_FAILED) std::perror("mmap"), std::exit(2);
            place = static_cast<uint8_t*>(all) + PAGE;
            if (mprotect(place, SIZE, PROT_READ | PROT_WRITE)) std::perror("mprotect"), std::exit(2);
        }
    }
    // A place of SIZE bytes, or null where all are taken.
    uint8_t* take() { return used_ < COUNT ? places_[used_++] : nullptr; }
    void give_back() { used_--; }

   private:
    uint8_t* places_[COUNT];
    size_t used_ = 0;
};
inline Pages pages;

// Exactly so many bytes that the input decides: at the end or at the start of pages or, where AddressSanitizer watches it, on
// the heap.
class Buffer {
   public:
    Buffer(Input& input, int64_t bytes) : size_(size_t(bytes)) {
        const int64_t where = input.below(4);
        if ((where > 1 || !EXL3_SANITIZED) && size_ + GUARD <= Pages::SIZE) place_ = pages.take();
        if (!place_) {
            heap_.reset(new uint8_t[size_]);
            at_ = heap_.get();
        } else {
            at_ = where % 2 == 0 ? place_ + Pages::SIZE - size_ : place_;
            guard_ = where % 2 == 0 ? at_ - GUARD : at_ + size_;
            std::memset(guard_, 0xC7, GUARD);
        }
        input.fill(at_, size_);
    }
    ~Buffer() {
        if (!place_) return;
        for (size_t i = 0; i < GUARD; i++)
            if (guard_[i] != 0xC7) fail("a byte beside a buffer", int64_t(i));
        pages.give_back();
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    uint8_t* get() const { return at_; }
    const uint16_t* words() const { return reinterpret_cast<const uint16_t*>(at_); }
    size_t size() const { return size_; }

   private:
    static constexpr size_t GUARD = 64;
    size_t size_;
    std::unique_ptr<uint8_t[]> heap_;
    uint8_t *place_ = nullptr, *at_ = nullptr, *guard_ = nullptr;
};

inline int64_t width_of(int64_t dtype) { return dtype == 0 ? 4 : 2; }
inline bool known(int64_t dtype) { return dtype >= 0 && dtype <= 2; }

// 0, 1 or 2; now and then none of them.
inline int32_t any_dtype(Input& input) { return int32_t(input.once_in(32) ? input.below(7) - 3 : input.below(3)); }

inline int32_t any_threads(Input& input) {
    static const int64_t odd[] = {0, -1, 2, 3, 5, INT32_MIN};
    return int32_t(input.once_in(64) ? input.any(odd) : 1);
}

// Generators of one call each.
void call_linear(Input& input);
void call_dequantize(Input& input);
void call_hadamard(Input& input);
void call_encode(Input& input, bool search);  // `search`: with weights to encode, which takes as long as ten thousand other calls
void call_gather(Input& input);
void call_moe(Input& input);
void call_launch(Input& input);
void call_small(Input& input);  // versions, texts, names

}  // namespace abi

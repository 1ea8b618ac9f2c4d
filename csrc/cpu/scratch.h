// Working memory of calls, which is kept from one to the next: fresh pages would be zeroed by the system at each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace exl3 {

// Bytes that only grow.
class Scratch {
   public:
    char* reserve(size_t size) {
        if (size > size_) {
            bytes_.reset();
            size_ = 0;
            bytes_.reset(static_cast<char*>(::operator new(size, std::align_val_t(64))));
            size_ = size;
        }
        return bytes_.get();
    }
    size_t size() const { return size_; }

   private:
    struct AlignedDelete {
        void operator()(char* bytes) const { ::operator delete(bytes, std::align_val_t(64)); }
    };

    std::unique_ptr<char, AlignedDelete> bytes_;
    size_t size_ = 0;
};

// Hands out aligned pieces; with base 0 it only measures. The base is a number: no pointer may be added to null.
struct Layout {
    uintptr_t base;
    size_t used = 0;

    template <class T>
    T* take(int64_t count) {
        T* piece = reinterpret_cast<T*>(base + used);
        used += (size_t(count) * sizeof(T) + 63) / 64 * 64;
        return piece;
    }
};

}  // namespace exl3

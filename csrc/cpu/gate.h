// Waiting for what other threads do: a short spin, then sleep.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace exl3 {

// Tells the processor that a loop waits.
inline void spin_once() {
#if defined(__x86_64__) || defined(_M_X64)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Where threads sleep until some condition on atomics holds. Whoever makes it true does so by a sequentially consistent
// store, then calls `notify`, which costs a load where nobody sleeps.
class Gate {
   public:
    template <class Condition>
    void wait(std::chrono::microseconds spin, Condition&& holds) {
        if (holds()) return;
        const auto end = std::chrono::steady_clock::now() + spin;
        do {
            for (int i = 0; i < 64; i++) {
                if (holds()) return;
                spin_once();
            }
        } while (std::chrono::steady_clock::now() < end);
        std::unique_lock<std::mutex> lock(mutex_);
        // Counted before the condition is read again: `notify` then sees the sleeper, or the sleeper its store.
        sleepers_.fetch_add(1);
        condition_.wait(lock, holds);
        sleepers_.fetch_sub(1);
    }

    void notify() {
        if (sleepers_.load() == 0) return;
        { const std::lock_guard<std::mutex> lock(mutex_); }  // a sleeper has read the condition, or sleeps
        condition_.notify_all();
    }

   private:
    std::mutex mutex_;
    std::condition_variable condition_;
    std::atomic<int> sleepers_{0};
};

}  // namespace exl3

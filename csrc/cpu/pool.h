// Threads that belong to the library, for callers that have no OpenMP runtime to lend: threads of CUDA's, or of a server.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "gate.h"

namespace exl3 {

class Pool {
   public:
    // Starts threads - 1 threads, on the processors `cpus` where that is not null.
    //
    // Throws std::system_error where the system starts no more threads or has no such processor.
    Pool(int threads, const int32_t* cpus, std::chrono::microseconds spin);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return int(workers_.size()) + 1; }
    // Whether this is the process that started the threads. A fork has none of them, and can neither run nor destroy it.
    bool usable() const;

    // Calls body(context, unit, thread) once for each unit in [0, units), with thread in [0, threads()); the calling thread
    // takes part as thread 0. Units are taken in order, so that one may wait for those before it. One run at a time.
    void run(int64_t units, void (*body)(void* context, int64_t unit, int thread), void* context);

    static constexpr int64_t MOST_UNITS = (1 << 24) - (1 << 16);  // of a run

   private:
    struct Ticket {
        uint64_t number;  // run << 48 | units << 24 | the next unit
        int64_t next() const { return int64_t(number & 0xffffff); }
        int64_t units() const { return int64_t(number >> 24 & 0xffffff); }
    };

    void stop();
    void serve(int thread);
    bool take(int thread);

    // A run's numbers are taken from one word: whoever gets a unit that is left has that run's data, which stay as they
    // are until the unit is done.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<bool> stopping_{false};
    void (*body_)(void*, int64_t, int) = nullptr;
    void* context_ = nullptr;
    std::chrono::microseconds spin_;
    uint64_t run_ = 0;
    int64_t process_;
    Gate idle_, finished_;
    std::vector<std::thread> workers_;
};

}  // namespace exl3

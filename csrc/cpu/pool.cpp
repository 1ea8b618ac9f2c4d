#include "pool.h"

#include <algorithm>
#include <system_error>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace exl3 {
namespace {

int64_t process() {
#if defined(__unix__) || defined(__APPLE__)
    return int64_t(getpid());
#else
    return 0;
#endif
}

// Signals are for the process' own threads: while this lives, those that are started get none.
class NoSignals {
   public:
#if defined(__linux__)
    NoSignals() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

   private:
    sigset_t before_;
#endif
};

void bind(std::thread& thread, int32_t cpu) {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    if (cpu < 0 || cpu >= CPU_SETSIZE) throw std::system_error(EINVAL, std::generic_category());
    CPU_SET(cpu, &set);
    const int error = pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
    if (error) throw std::system_error(error, std::generic_category());
#else
    (void)thread, (void)cpu;
#endif
}

}  // namespace

Pool::Pool(int threads, const int32_t* cpus, std::chrono::microseconds spin) : spin_(spin), process_(process()) {
    const NoSignals quiet;
    try {
        workers_.reserve(size_t(threads) - 1);
        for (int i = 1; i < threads; i++) {
            workers_.emplace_back(&Pool::serve, this, i);
            if (cpus) bind(workers_.back(), cpus[i - 1]);
        }
    } catch (...) {
        stop();
        throw;
    }
}

Pool::~Pool() { stop(); }

bool Pool::usable() const { return process() == process_; }

void Pool::stop() {
    stopping_.store(true);
    idle_.notify();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
}

// Does one unit, if there is one left.
bool Pool::take(int thread) {
    const Ticket seen{ticket_.load(std::memory_order_acquire)};
    if (seen.next() >= seen.units()) return false;  // without adding to a word that others poll
    const Ticket mine{ticket_.fetch_add(1, std::memory_order_acq_rel)};
    if (mine.next() >= mine.units()) return false;
    body_(context_, mine.next(), thread);
    if (done_.fetch_add(1) + 1 == mine.units()) finished_.notify();
    return true;
}

void Pool::serve(int thread) {
    while (!stopping_.load(std::memory_order_relaxed)) {
        while (take(thread)) {
        }
        idle_.wait(spin_, [this] {
            const Ticket seen{ticket_.load()};
            return seen.next() < seen.units() || stopping_.load();
        });
    }
}

void Pool::run(int64_t units, void (*body)(void*, int64_t, int), void* context) {
    for (int64_t first = 0; first < units; first += MOST_UNITS) {
        struct Part {
            void (*body)(void*, int64_t, int);
            void* context;
            int64_t first;
        } part{body, context, first};
        body_ = [](void* data, int64_t unit, int thread) {
            const Part& part = *static_cast<Part*>(data);
            part.body(part.context, part.first + unit, thread);
        };
        context_ = &part;
        const int64_t count = std::min(units - first, MOST_UNITS);
        done_.store(0, std::memory_order_relaxed);
        ticket_.store(++run_ << 48 | uint64_t(count) << 24);
        idle_.notify();
        while (take(0)) {
        }
        finished_.wait(spin_, [&] { return done_.load() == count; });
    }
}

}  // namespace exl3

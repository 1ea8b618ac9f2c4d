#include "parallel.h"

#include <atomic>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace exl3 {
namespace {

using GompParallel = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);

std::atomic<GompParallel> gomp_parallel{nullptr};

struct Team {
    void (*body)(void*, int64_t, int);
    void* context;
    int64_t units;
    std::atomic<int64_t> next{0};
    std::atomic<int> members{0};
    std::atomic<bool> failed{false};
    std::exception_ptr failure;  // the first, written by the member that set `failed`
};

void work(void* data) {
    Team& team = *static_cast<Team*>(data);
    // Members number themselves, so a runtime that delivers fewer threads than asked changes nothing.
    const int thread = team.members.fetch_add(1, std::memory_order_relaxed);
    for (int64_t unit; (unit = team.next.fetch_add(1, std::memory_order_relaxed)) < team.units;) {
        try {
            team.body(team.context, unit, thread);
        } catch (...) {  // out of memory: it may not leave a thread, nor pass through an OpenMP runtime
            if (!team.failed.exchange(true)) team.failure = std::current_exception();
            team.next.store(team.units, std::memory_order_relaxed);
        }
    }
}

}  // namespace

void set_openmp(void* address) { gomp_parallel.store(reinterpret_cast<GompParallel>(address)); }

void parallel_for(int64_t units, int threads, void (*body)(void*, int64_t, int), void* context) {
    if (units < threads) threads = int(units);
    if (threads <= 1) {
        for (int64_t unit = 0; unit < units; unit++) body(context, unit, 0);
        return;
    }
    Team team{body, context, units};
    if (GompParallel run = gomp_parallel.load(std::memory_order_relaxed)) {
        run(work, &team, unsigned(threads), 0);
        if (team.failed) std::rethrow_exception(team.failure);
        return;
    }
    // Without an OpenMP runtime in the process (no torch): short-lived threads, which also survive
    // a fork between calls. They cost tens of microseconds a call, little against an encoder's run.
    std::vector<std::thread> helpers;
    helpers.reserve(size_t(threads) - 1);
    try {
        for (int i = 1; i < threads; i++) helpers.emplace_back(work, &team);
    } catch (const std::system_error&) {  // the system starts no more of them: those that run share the work
    }
    work(&team);
    for (std::thread& helper : helpers) helper.join();
    if (team.failed) std::rethrow_exception(team.failure);
}

}  // namespace exl3

// Runs independent units of work on several threads without owning any while idle.
#pragma once

#include <cstdint>
#include <type_traits>

namespace exl3 {

constexpr int MOST_THREADS = 1024;  // of a call whose working memory grows with them

// The address of GOMP_parallel in the OpenMP runtime that the process already runs, or null.
// Borrowing that runtime's threads keeps its CPU binding and leaves no second pool to compete.
void set_openmp(void* gomp_parallel);

// Calls body(context, unit, thread) once for each unit in [0, units), with thread in [0, threads).
// Units are taken in order by whichever thread is free; the call returns when all are done.
void parallel_for(int64_t units, int threads, void (*body)(void* context, int64_t unit, int thread), void* context);

// A function object as the two arguments that stand for it across an interface of plain functions.
struct UnitBody {
    void (*function)(void* context, int64_t unit, int thread);
    void* context;
};

template <class Function>
UnitBody unit_body(Function& function) {
    using Plain = std::remove_const_t<Function>;
    return {[](void* context, int64_t unit, int thread) { (*static_cast<Function*>(context))(unit, thread); },
            const_cast<Plain*>(&function)};
}

template <class Function>
void parallel_for(int64_t units, int threads, Function&& function) {
    const UnitBody body = unit_body(function);
    parallel_for(units, threads, body.function, body.context);
}

}  // namespace exl3

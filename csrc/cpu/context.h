// What calls of routed experts keep between them: threads and working memory.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>

#include "gate.h"
#include "pool.h"
#include "scratch.h"

// Without a pool, the process' OpenMP runtime runs the calls (parallel.h).
struct exl3_context {
    std::mutex busy;  // held by the call that uses it
    std::unique_ptr<exl3::Pool> pool;
    exl3::Scratch scratch;
    exl3::Gate gate;  // where units wait for those before them
    std::chrono::microseconds spin{50};
};

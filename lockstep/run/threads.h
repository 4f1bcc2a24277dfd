#pragma once

#include <chrono>
#include <functional>

#include "lockstep/lockstep.h"

namespace lockstep {

// Runs `work` as every rank of a job of threads and returns the largest of their exit codes. When
// ranks fail, throws what one of them failed of by itself, not because of another; with `survive`
// only when all have failed.
int run_threads(int world_size, std::chrono::nanoseconds timeout, bool survive,
                const std::function<int(Job&)>& work);

}  // namespace lockstep

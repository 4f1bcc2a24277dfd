#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <functional>

namespace lockstep {

struct CudaPatience {
  std::chrono::nanoseconds most = std::chrono::minutes(10);
  std::function<void()> meanwhile;  // called every millisecond or so; throws to give up
};

// Returns when `event` has happened; on a core of its own, since a sleep would cost as much as it
// waits for. Throws Error{kTimeout} with what was being done when that takes too long, and gives up
// the GPU: nothing of it is freed after that.
void wait_for(cudaEvent_t event, const char* operation, const CudaPatience& patience);

}  // namespace lockstep

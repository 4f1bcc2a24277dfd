#include "lockstep/base/cuda/wait.h"

#include <fmt/format.h>

#include <thread>

#include "lockstep/base/cuda/memory.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"

namespace lockstep {

void wait_for(cudaEvent_t event, const char* operation, const CudaPatience& patience) {
  using Clock = Deadline::Clock;
  const Deadline deadline = Deadline::after(patience.most);
  Clock::time_point look = Clock::now() + std::chrono::milliseconds(1);
  for (;;) {
    const cudaError_t status = cudaEventQuery(event);
    if (status != cudaErrorNotReady) return check_cuda(status, operation);
    if (Clock::now() < look) {
      std::this_thread::yield();
      continue;
    }
    if (patience.meanwhile) patience.meanwhile();
    if (deadline.expired()) {
      give_up_cuda();
      throw Error(ErrorCode::kTimeout,
                  fmt::format("CUDA: {}: the GPU has not finished within {:.3g} s", operation,
                              std::chrono::duration<double>(patience.most).count()));
    }
    look = Clock::now() + std::chrono::milliseconds(1);
  }
}

}  // namespace lockstep

#include "lockstep/base/cuda/runtime.h"

#include <fmt/format.h>

#include <atomic>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

double gib(std::size_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

std::atomic<bool> given_up{false};

}  // namespace

bool cuda_given_up() { return given_up.load(std::memory_order_relaxed); }
void give_up_cuda() { given_up.store(true, std::memory_order_relaxed); }

void check_cuda(cudaError_t status, const char* operation) {
  if (status == cudaSuccess) return;
  throw Error(ErrorCode::kDevice,
              fmt::format("CUDA: {}: {}", operation, cudaGetErrorString(status)));
}

CudaStream make_stream() {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  return CudaStream(stream);
}

CudaEvent make_event() {
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
  return CudaEvent(event);
}

CudaEvent make_timer_event() {
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreate(&event), "making an event");
  return CudaEvent(event);
}

DeviceMemory::DeviceMemory(std::size_t bytes, const char* purpose) : bytes_(bytes) {
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, bytes > 0 ? bytes : 1);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());  // it is told here
    std::size_t free = 0;
    std::size_t total = 0;
    static_cast<void>(cudaMemGetInfo(&free, &total));
    throw Error(ErrorCode::kDevice,
                fmt::format("out of GPU memory: {:.2f} GiB for {}, where {:.2f} of {:.2f} GiB are "
                            "free",
                            gib(bytes), purpose, gib(free), gib(total)));
  }
  check_cuda(status, "taking memory");
  data_.reset(data);
}

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

namespace lockstep::cuda {

void check_launch(const char* kernel) { check_cuda(cudaGetLastError(), kernel); }

void allow_shared(const void* kernel, unsigned bytes) {
  constexpr unsigned kUnasked = 48 << 10;
  if (bytes <= kUnasked) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)),
             "asking for shared memory");
}

}  // namespace lockstep::cuda

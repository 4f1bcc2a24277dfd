#include "lockstep/base/cuda/memory.h"

#include <fmt/format.h>

#include <atomic>

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
  throw Error(ErrorCode::kIo, fmt::format("CUDA: {}: {}", operation, cudaGetErrorString(status)));
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
    throw Error(ErrorCode::kIo,
                fmt::format("out of GPU memory: {:.2f} GiB for {}, where {:.2f} of {:.2f} GiB are "
                            "free",
                            gib(bytes), purpose, gib(free), gib(total)));
  }
  check_cuda(status, "taking memory");
  data_.reset(data);
}

}  // namespace lockstep

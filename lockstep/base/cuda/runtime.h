#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

namespace lockstep {

// Throws Error{kDevice} that says what was being done, unless `status` is success.
void check_cuda(cudaError_t status, const char* operation);

// Whether a wait for the GPU has ended by its deadline (wait_for()). From then on nothing is freed
// or destroyed any more: that would wait for the GPU, too.
bool cuda_given_up();
void give_up_cuda();

// Move-only owner of a handle of the runtime.
template <typename Handle, auto Destroy>
class CudaHandle {
 public:
  explicit CudaHandle(Handle handle = nullptr) : handle_(handle) {}
  Handle get() const { return handle_.get(); }

 private:
  struct Free {
    void operator()(Handle handle) const {
      if (!cuda_given_up()) static_cast<void>(Destroy(handle));
    }
  };
  std::unique_ptr<std::remove_pointer_t<Handle>, Free> handle_;
};

using CudaStream = CudaHandle<cudaStream_t, cudaStreamDestroy>;
using CudaEvent = CudaHandle<cudaEvent_t, cudaEventDestroy>;
using CudaGraph = CudaHandle<cudaGraphExec_t, cudaGraphExecDestroy>;

CudaStream make_stream();
CudaEvent make_event();        // for order only
CudaEvent make_timer_event();  // that can be timed

// Bytes on the device. Alignment 256.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  // Throws Error{kDevice} with what was needed and what was free; `purpose` names it.
  DeviceMemory(std::size_t bytes, const char* purpose);

  void* data() const { return data_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* data) const {
      if (!cuda_given_up()) static_cast<void>(cudaFree(data));
    }
  };
  std::unique_ptr<void, Free> data_;
  std::size_t bytes_ = 0;
};

// An array on the device.
template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(std::size_t count, const char* purpose)
      : memory_(count * sizeof(T), purpose), count_(count) {}

  T* data() const { return static_cast<T*>(memory_.data()); }
  std::size_t size() const { return count_; }

 private:
  DeviceMemory memory_;
  std::size_t count_ = 0;
};

// Page-locked memory of the host, zeroed, which the device can copy to and from on its own.
template <typename T>
class PinnedArray {
 public:
  PinnedArray() = default;
  explicit PinnedArray(std::size_t count) : count_(count) {
    void* data = nullptr;
    check_cuda(
        cudaHostAlloc(&data, std::max<std::size_t>(1, count) * sizeof(T), cudaHostAllocDefault),
        "taking page-locked memory of the host");
    data_.reset(static_cast<T*>(data));
    std::fill_n(data_.get(), count, T{});
  }

  T* data() const { return data_.get(); }
  std::size_t size() const { return count_; }

 private:
  struct Free {
    void operator()(T* data) const {
      if (!cuda_given_up()) static_cast<void>(cudaFreeHost(data));
    }
  };
  std::unique_ptr<T, Free> data_;
  std::size_t count_ = 0;
};

struct CudaPatience {
  std::chrono::nanoseconds most = std::chrono::minutes(10);
  std::function<void()> meanwhile;  // called every millisecond or so; throws to give up
};

// Returns when `event` has happened; on a core of its own, since a sleep would cost as much as it
// waits for. Throws Error{kTimeout} with what was being done when that takes too long, and gives up
// the GPU: nothing of it is freed after that.
void wait_for(cudaEvent_t event, const char* operation, const CudaPatience& patience);

}  // namespace lockstep

namespace lockstep::cuda {

// Throws when the kernel that was just enqueued could not be.
void check_launch(const char* kernel);

// Lets a kernel have more shared memory than the 48 KiB it gets unasked.
void allow_shared(const void* kernel, unsigned bytes);

}  // namespace lockstep::cuda

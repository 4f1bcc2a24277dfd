#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/base/cuda_memory.h"
#include "lockstep/model/layout.h"

namespace lockstep {

// Memory of the host beside slots on the device, and the stream that copies between them while the
// device computes.
class CudaStaging {
 public:
  explicit CudaStaging(std::vector<float*> slots);
  ~CudaStaging();
  CudaStaging(const CudaStaging&) = delete;
  CudaStaging& operator=(const CudaStaging&) = delete;

  // Page-locks `host` where the system allows it: copies are then asynchronous and faster.
  void attach(std::uint32_t slot, std::span<float> host);
  // Enqueues a copy to the host, on the stream of its own.
  void download(std::uint32_t slot, Range range);
  // Enqueues a copy to the device; the next work on `stream` comes after it.
  void upload(std::uint32_t slot, Range range, cudaStream_t stream);

  cudaStream_t stream() const { return stream_.get(); }

 private:
  std::vector<float*> slots_;
  std::vector<std::span<float>> hosts_;
  std::vector<void*> locked_;
  CudaStream stream_;
};

}  // namespace lockstep

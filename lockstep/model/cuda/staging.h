#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/base/cuda/runtime.h"
#include "lockstep/model/layout.h"

namespace lockstep {

// Memory of the host beside accumulators on the device, and streams that copy between them while
// the device computes: one for each direction.
class CudaStaging {
 public:
  CudaStaging();
  // No copy may be under way.
  ~CudaStaging();
  CudaStaging(const CudaStaging&) = delete;
  CudaStaging& operator=(const CudaStaging&) = delete;

  // Other accumulators; none has memory of the host yet. No copy may be under way.
  void set_accumulators(std::vector<float*> accumulators);
  // Page-locks `host` where the system allows it: copies are then asynchronous and faster.
  void attach(std::uint32_t accumulator, std::span<float> host);
  // The same for memory that belongs to no accumulator and outlives this.
  void lock(std::span<float> host);
  // Gives up what was attached. No copy may be under way.
  void release();
  // Enqueues a copy to the host, on stream().
  void download(std::uint32_t accumulator, Range range);
  // Enqueues a copy to the device at once.
  void upload(std::uint32_t accumulator, Range range);
  // What is enqueued on `stream` from now on comes after the uploads.
  void join_uploads(cudaStream_t stream);

  cudaStream_t stream() const { return stream_.get(); }
  cudaStream_t upload_stream() const { return up_.get(); }

 private:
  std::vector<float*> accumulators_;
  std::vector<std::span<float>> hosts_;
  std::vector<void*> staged_, locked_;  // that are page-locked: of accumulators, others
  CudaStream stream_, up_;
  CudaEvent uploaded_;
};

}  // namespace lockstep

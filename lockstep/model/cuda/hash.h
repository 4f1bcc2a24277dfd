#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "lockstep/base/cuda/runtime.h"
#include "lockstep/base/hash/blake3.h"
#include "lockstep/model/layout.h"

namespace lockstep {

// BLAKE3 of every tensor of flat parameters on the device: a thread per chunk, then per parent
// node, level by level over all tensors at once.
class CudaHasher {
 public:
  explicit CudaHasher(const ParameterLayout& layout);

  void enqueue(const float* parameters, cudaStream_t stream);
  // When the stream is done: in the order of layout.tensors().
  std::vector<Blake3Hash> result() const;

 private:
  void take_memory();

  std::vector<std::uint64_t> begin_;  // of tensors, in elements
  std::vector<std::vector<std::uint32_t>>
      levels_;  // where the nodes of each tensor begin, per level
  // Taken when first needed.
  DeviceArray<std::uint64_t> device_begin_;
  DeviceArray<std::uint32_t> device_levels_;
  DeviceArray<std::uint32_t> nodes_, next_nodes_;
  PinnedArray<Blake3Hash> hashes_;
};

}  // namespace lockstep

#include "lockstep/model/cuda/cuda_staging.h"

#include "lockstep/base/check.h"

namespace lockstep {

CudaStaging::CudaStaging(std::vector<float*> slots)
    : slots_(std::move(slots)), hosts_(slots_.size()), stream_(make_stream()) {}

CudaStaging::~CudaStaging() {
  if (cuda_given_up()) return;
  static_cast<void>(cudaStreamSynchronize(stream_.get()));
  for (void* memory : locked_) static_cast<void>(cudaHostUnregister(memory));
}

void CudaStaging::attach(std::uint32_t slot, std::span<float> host) {
  hosts_.at(slot) = host;
  if (cudaHostRegister(host.data(), host.size_bytes(), cudaHostRegisterDefault) == cudaSuccess) {
    locked_.push_back(host.data());
  } else {
    static_cast<void>(cudaGetLastError());  // slower, and right all the same
  }
}

void CudaStaging::download(std::uint32_t slot, Range range) {
  LOCKSTEP_CHECK(range.end <= hosts_.at(slot).size());
  check_cuda(cudaMemcpyAsync(hosts_[slot].data() + range.begin, slots_[slot] + range.begin,
                             range.size() * sizeof(float), cudaMemcpyDeviceToHost, stream_.get()),
             "copying a gradient");
}

void CudaStaging::upload(std::uint32_t slot, Range range, cudaStream_t stream) {
  LOCKSTEP_CHECK(range.end <= hosts_.at(slot).size());
  check_cuda(cudaMemcpyAsync(slots_[slot] + range.begin, hosts_[slot].data() + range.begin,
                             range.size() * sizeof(float), cudaMemcpyHostToDevice, stream),
             "copying a gradient");
}

}  // namespace lockstep

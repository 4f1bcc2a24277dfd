#include "lockstep/model/cuda/staging.h"

#include "lockstep/base/check.h"

namespace lockstep {

CudaStaging::CudaStaging(std::vector<float*> accumulators)
    : accumulators_(std::move(accumulators)),
      hosts_(accumulators_.size()),
      stream_(make_stream()),
      up_(make_stream()),
      uploaded_(make_event()) {}

CudaStaging::~CudaStaging() {
  if (cuda_given_up()) return;
  for (void* memory : locked_) static_cast<void>(cudaHostUnregister(memory));
}

void CudaStaging::attach(std::uint32_t accumulator, std::span<float> host) {
  hosts_.at(accumulator) = host;
  lock(host);
}

void CudaStaging::lock(std::span<float> host) {
  if (cudaHostRegister(host.data(), host.size_bytes(), cudaHostRegisterDefault) == cudaSuccess) {
    locked_.push_back(host.data());
  } else {
    static_cast<void>(cudaGetLastError());  // slower, and right all the same
  }
}

void CudaStaging::download(std::uint32_t accumulator, Range range) {
  LOCKSTEP_CHECK(range.end <= hosts_.at(accumulator).size());
  check_cuda(cudaMemcpyAsync(hosts_[accumulator].data() + range.begin,
                             accumulators_[accumulator] + range.begin, range.size() * sizeof(float),
                             cudaMemcpyDeviceToHost, stream_.get()),
             "copying a gradient");
}

void CudaStaging::upload(std::uint32_t accumulator, Range range) {
  LOCKSTEP_CHECK(range.end <= hosts_.at(accumulator).size());
  check_cuda(cudaMemcpyAsync(accumulators_[accumulator] + range.begin,
                             hosts_[accumulator].data() + range.begin, range.size() * sizeof(float),
                             cudaMemcpyHostToDevice, up_.get()),
             "copying a gradient");
}

void CudaStaging::join_uploads(cudaStream_t stream) {
  check_cuda(cudaEventRecord(uploaded_.get(), up_.get()), "copying a gradient");
  check_cuda(cudaStreamWaitEvent(stream, uploaded_.get()), "copying a gradient");
}

}  // namespace lockstep

#include "lockstep/model/cuda/staging.h"

#include <utility>

#include "lockstep/base/check.h"

namespace lockstep {

namespace {

void page_lock(std::span<float> host, std::vector<void*>& locked) {
  if (cudaHostRegister(host.data(), host.size_bytes(), cudaHostRegisterDefault) == cudaSuccess) {
    locked.push_back(host.data());
  } else {
    static_cast<void>(cudaGetLastError());  // slower, and right all the same
  }
}

void unlock_pages(std::vector<void*>& locked) {
  if (cuda_given_up()) return;
  for (void* memory : std::exchange(locked, {})) static_cast<void>(cudaHostUnregister(memory));
}

}  // namespace

CudaStaging::CudaStaging() : stream_(make_stream()), up_(make_stream()), uploaded_(make_event()) {}

CudaStaging::~CudaStaging() {
  unlock_pages(staged_);
  unlock_pages(locked_);
}

void CudaStaging::set_accumulators(std::vector<float*> accumulators) {
  release();
  accumulators_ = std::move(accumulators);
  hosts_.assign(accumulators_.size(), {});
}

void CudaStaging::attach(std::uint32_t accumulator, std::span<float> host) {
  hosts_.at(accumulator) = host;
  page_lock(host, staged_);
}

void CudaStaging::lock(std::span<float> host) { page_lock(host, locked_); }

void CudaStaging::release() {
  hosts_.assign(hosts_.size(), {});
  unlock_pages(staged_);
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

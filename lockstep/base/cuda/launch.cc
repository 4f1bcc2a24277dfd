#include "lockstep/base/cuda/launch.h"

#include "lockstep/base/cuda/memory.h"

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

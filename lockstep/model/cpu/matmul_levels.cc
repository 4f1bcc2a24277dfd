#include <fmt/format.h>

#include "lockstep/base/error.h"
#include "lockstep/base/processor.h"
#include "lockstep/model/cpu/amx.h"
#include "lockstep/model/cpu/matmul_kernel.h"

namespace lockstep {

std::string_view to_string(Precision precision) {
  return precision == Precision::kF32 ? "fp32" : "bf16";
}

std::vector<const MatmulKernel*> supported_kernels(Precision precision) {
  std::vector<const MatmulKernel*> kernels;
#ifdef __x86_64__
  if (precision == Precision::kBf16) {
    // Every processor with the matrix unit converts to bf16, too.
    if (runs_x86_64_v4() && amx_bf16_available()) kernels.push_back(&kMatmulAmx);
    return kernels;
  }
  if (runs_x86_64_v4()) kernels.push_back(&kMatmulV4);
  if (runs_x86_64_v3()) kernels.push_back(&kMatmulV3);
#endif
  if (precision == Precision::kF32) kernels.push_back(&kMatmulGeneric);
  return kernels;
}

const MatmulKernel& best_kernel(Precision precision) {
  const auto kernels = supported_kernels(precision);
  if (kernels.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("this processor has no matrix products of {0}; --precision {1} works",
                            to_string(precision), to_string(Precision::kF32)));
  }
  return *kernels.front();
}

bool supports(Precision precision) { return !supported_kernels(precision).empty(); }

}  // namespace lockstep

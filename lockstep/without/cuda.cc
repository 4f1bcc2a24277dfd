#include "lockstep/base/error.h"
#include "lockstep/model/gpu_model.h"

namespace lockstep {

std::optional<std::string> gpu_refusal() { return "this build has no CUDA"; }

int gpu_count() { return 0; }

std::string gpu_name() { return "none"; }

GpuVersions gpu_versions() { return {}; }

std::unique_ptr<GpuModel> make_gpu_model(const GpuModelOptions&) {
  throw Error(ErrorCode::kInvalidArgument, "--device cuda: " + *gpu_refusal());
}

double gpu_matmul_gflops(Precision) {
  throw Error(ErrorCode::kInvalidArgument, "--device cuda: " + *gpu_refusal());
}

}  // namespace lockstep

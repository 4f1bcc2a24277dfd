#include "lockstep/run/device.h"

#include <fmt/format.h>

#include <optional>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/comm/nccl/device_reducer.h"
#include "lockstep/model/gpu_model.h"
#include "lockstep/train/agreement.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse_device(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

}  // namespace

std::string choose_device(const std::string& device) {
  if (device == "cpu") return device;
  const auto refusal = gpu_refusal();
  if (!refusal) return "cuda";
  if (device == "cuda") {
    refuse_device("--device cuda: no GPU: " + *refusal);
  }
  log(LogLevel::kInfo, "computing on the CPU: no GPU: {}", *refusal);
  return "cpu";
}

std::string_view to_string(ExchangeChoice choice) {
  switch (choice) {
    case ExchangeChoice::kAuto: return "auto";
    case ExchangeChoice::kHost: return "host";
    case ExchangeChoice::kNccl: return "nccl";
  }
  return "?";
}

void choose_exchange(ExchangeChoice choice, bool gpu, int device, Communicator& communicator,
                     ReducerOptions& reducer) {
  const bool native = reducer.reduction == Reduction::kNccl;
  const bool wanted = native || choice == ExchangeChoice::kNccl;
  const std::vector<Setting> settings = {{"device", gpu ? "cuda" : "cpu"},
                                         {"exchange", std::string(to_string(choice))},
                                         {"reduction", std::string(to_string(reducer.reduction))},
                                         {"wire type", std::string(to_string(reducer.wire))}};
  compare_settings(communicator, settings);
  const char* flag = native ? "--reduction nccl" : "--exchange nccl";
  if (wanted && !gpu) refuse_device(std::string(flag) + " needs --device cuda");
  // What only the host can do.
  std::optional<std::string> refusal;
  if (reducer.wire != DataType::kF32) refusal = "--wire-dtype bf16 is the host's";
  if (reducer.reduction != Reduction::kTree && !native) {
    refusal = fmt::format("--reduction {} is the host's", to_string(reducer.reduction));
  }
  if (communicator.finite_only()) refusal = "the gradient server adds them";
  if (!wanted) {
    const bool pointless = !gpu || communicator.world_size() == 1;
    if (pointless || choice == ExchangeChoice::kHost) return;
  }
  if (!refusal) refusal = device_reducer_refusal(communicator, device);
  if (refusal && wanted) refuse_device(std::string(flag) + ": " + *refusal);
  reducer.on_device = !refusal;
  if (communicator.rank() != 0) return;
  if (refusal) {
    log(LogLevel::kInfo, "gradients go through the host: {}", *refusal);
  } else {
    log(LogLevel::kInfo, "gradients go from GPU to GPU (NCCL)");
  }
}

}  // namespace lockstep

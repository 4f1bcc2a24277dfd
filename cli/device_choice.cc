#include "cli/device_choice.h"

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/model/gpu_model.h"

namespace lockstep::cli {

CLI::Option* add_device_option(CLI::App& command, std::string& device) {
  return command
      .add_option("--device", device,
                  "cpu, cuda, or auto: a GPU if there is one, otherwise the CPU")
      ->check(CLI::IsMember({"cpu", "cuda", "auto"}))
      ->option_text("NAME [cpu]");
}

std::string choose_device(const std::string& device) {
  if (device == "cpu") return device;
  const auto refusal = gpu_refusal();
  if (!refusal) return "cuda";
  if (device == "cuda") {
    throw Error(ErrorCode::kInvalidArgument, "--device cuda: no GPU: " + *refusal);
  }
  log(LogLevel::kInfo, "computing on the CPU: no GPU: {}", *refusal);
  return "cpu";
}

}  // namespace lockstep::cli

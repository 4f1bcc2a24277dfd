#pragma once

#include <chrono>

#include "cli/commands.h"
#include "cli/synthetic.h"
#include "lockstep/base/error.h"

namespace lockstep::cli {

// What `lockstep coordinator` and `lockstep worker` share.

// The flags of the synthetic job.
void add_synthetic_options(CLI::App& command, SyntheticOptions& options);

// Whether the job was halted on a defect: a non-finite value, or a worker that sent what nobody
// expects. The exit code is then kExitHalted, otherwise what main makes of the error.
bool is_defect(ErrorCode code);

// A clock for progress: true at most twice a second.
class ProgressClock {
 public:
  bool due() {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < std::chrono::milliseconds(500)) return false;
    last_ = now;
    return true;
  }

 private:
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace lockstep::cli

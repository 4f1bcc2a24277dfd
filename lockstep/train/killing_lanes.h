#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/data/lanes.h"
#include "lockstep/train/halt.h"

namespace lockstep {

// Finds lanes that kill: a step that loses workers by their own fault, again and again, always with
// the same lanes. Pure. All ranks are told the same and find the same.
class KillingLanes {
 public:
  static constexpr std::size_t kTimes = 3;  // in a row

  struct Finding {
    std::int64_t step = 0;             // counted from 1
    std::vector<std::uint32_t> lanes;  // that all of them had, in order
    std::string how;                   // how the last one ended
  };

  // A worker that had these lanes of step `step` was lost by its own fault: a signal such as
  // SIGSEGV, SIGBUS or SIGABRT, no memory, an error of CUDA. Those that were killed, stopped or cut
  // off are not told. Workers that were lost in one generation count as one time.
  void lost(std::int64_t step, std::uint64_t generation, std::span<const std::uint32_t> lanes,
            const std::string& how);
  // The step is done: its lanes do not kill.
  void done(std::int64_t step);

  // Set once a step was lost so many times in a row and some lanes were there every time.
  std::optional<Finding> finding(std::size_t times = kTimes) const;

 private:
  struct Loss {
    std::uint64_t generation = 0;
    std::vector<std::uint32_t> lanes;  // sorted, of all that were lost together
  };

  std::int64_t step_ = 0;
  std::vector<Loss> losses_;  // of `step_`, the last ones
  std::string how_;
};

// halt.json for a finding: --replay computes the lanes once more, --skip-lanes leaves them out.
HaltReport halt_report(const KillingLanes::Finding& finding, const LanePlan& plan);

}  // namespace lockstep

#include "lockstep/train/step_report.h"

#include <algorithm>

namespace lockstep {

std::string_view to_string(Phase phase) {
  switch (phase) {
    case Phase::kData: return "data";
    case Phase::kForward: return "forward";
    case Phase::kBackward: return "backward";
    case Phase::kCommunication: return "communication";
    case Phase::kOptimizer: return "optimizer";
    case Phase::kVerify: return "verify";
    case Phase::kSave: return "save";
    case Phase::kHidden: return "hidden";
  }
  return "?";
}

std::optional<Straggler> find_straggler(std::span<const double> seconds_by_rank, double share) {
  if (seconds_by_rank.size() < 2) return std::nullopt;
  const auto slowest = std::ranges::max_element(seconds_by_rank);
  std::vector<double> others(seconds_by_rank.begin(), seconds_by_rank.end());
  others.erase(others.begin() + (slowest - seconds_by_rank.begin()));
  std::ranges::sort(others);
  const double median = (others[(others.size() - 1) / 2] + others[others.size() / 2]) / 2;
  if (median <= 0 || *slowest <= median * (1 + share)) return std::nullopt;
  return Straggler{static_cast<int>(slowest - seconds_by_rank.begin()), *slowest / median - 1};
}

}  // namespace lockstep

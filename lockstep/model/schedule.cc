#include "lockstep/model/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace lockstep {

std::string_view to_string(Decay decay) {
  switch (decay) {
    case Decay::kCosine: return "cosine";
    case Decay::kLinear: return "linear";
    case Decay::kConstant: return "constant";
  }
  return "unknown";
}

std::optional<Decay> parse_decay(std::string_view name) {
  for (const Decay decay : {Decay::kCosine, Decay::kLinear, Decay::kConstant}) {
    if (name == to_string(decay)) return decay;
  }
  return std::nullopt;
}

double learning_rate(const Schedule& schedule, std::int64_t step) {
  if (step < schedule.warmup) {
    return schedule.peak * (static_cast<double>(step + 1) / static_cast<double>(schedule.warmup));
  }
  if (schedule.decay == Decay::kConstant) return schedule.peak;
  // From the last step of the warm-up, or from step 0 when there is none, to the last of the run.
  const std::int64_t first = std::max<std::int64_t>(schedule.warmup - 1, 0);
  const std::int64_t length = std::max<std::int64_t>(schedule.steps - 1 - first, 1);
  const double gone =
      static_cast<double>(std::min(step - first, length)) / static_cast<double>(length);
  const double left = schedule.decay == Decay::kLinear
                          ? 1.0 - gone
                          : 0.5 * (1.0 + std::cos(std::numbers::pi * gone));
  return schedule.floor + (schedule.peak - schedule.floor) * left;
}

}  // namespace lockstep

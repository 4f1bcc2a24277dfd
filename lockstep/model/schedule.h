#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace lockstep {

enum class Decay { kCosine, kLinear, kConstant };

std::string_view to_string(Decay decay);  // "cosine", "linear", "constant"
std::optional<Decay> parse_decay(std::string_view name);

// Learning rate over a run: it rises linearly for `warmup` steps, reaching `peak` in the last of
// them, then decays to `floor` in step `steps` - 1.
struct Schedule {
  Decay decay = Decay::kCosine;
  double peak = 3e-4;
  double floor = 0.0;
  std::int64_t warmup = 0;
  std::int64_t steps = 1;
};

// Of step 0, 1, ...: a function of the step alone, in f64. After the last step it stays at `floor`.
double learning_rate(const Schedule& schedule, std::int64_t step);

}  // namespace lockstep

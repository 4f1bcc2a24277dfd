#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "lockstep/train/step_report.h"

namespace lockstep {

// Where a run stands.
struct RunProgress {
  std::int64_t step = 0;
  std::int64_t steps = 0;
  double loss = 0;
  std::optional<double> validation_loss;  // the latest
  std::optional<double> validation_accuracy;
  double tokens_per_second = 0;  // a moving average
  double seconds_left = 0;
  int workers = 0;  // 0: not shown, because there was never more than one
};

// "1.20k", "34.0M": three significant digits.
std::string short_number(double value);
// "45s", "3m20s", "2h05m"
std::string short_duration(double seconds);

// One line of at most `width` columns; the bar fills what the words leave.
std::string format_bar(const RunProgress& progress, int width);
// What goes ahead of a bar: back to where the one before began, and clears it. That one had so many
// columns; on a terminal that is narrower now it takes several lines.
std::string over_bar(int columns_before, int width);
// One line for a log file.
std::string format_plain(const RunProgress& progress);

// When plain lines come, for steps of any length: one at once, more soon, then every half minute at
// the latest. Pure: the time is passed in.
class LinePace {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // Whether a line is due. `wanted`: it is, for another reason.
  bool due(Time now, bool wanted);

 private:
  std::optional<Time> last_;
  std::chrono::seconds pause_{2};
};

// "lanes: rank 2 has 5 of 32 (was 8), rank 3 has 11 (was 8)": the ranks whose lanes are more or
// fewer than before; empty when there are none.
std::string describe_lanes(std::span<const std::uint32_t> before,
                           std::span<const std::uint32_t> now);

// Turns the reports of steps into progress, with a moving average of the speed.
class ProgressMeter {
 public:
  explicit ProgressMeter(std::int64_t steps) { progress_.steps = steps; }
  const RunProgress& update(const StepReport& report);

 private:
  RunProgress progress_;
  bool several_ = false;  // workers, in some step
  double seconds_per_step_ = 0;
};

}  // namespace lockstep

#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/report/progress.h"

namespace lockstep {

enum class LogStyle { kBar, kPlain, kJson };

std::string_view to_string(LogStyle style);  // "bar", "plain", "json"
std::optional<LogStyle> parse_log_style(std::string_view name);
// A bar when stderr is a terminal, otherwise plain lines.
LogStyle default_log_style();

// Shows a run while it trains: a bar on stderr that is redrawn in place, plain lines on stdout
// (about twenty, every validation, and one every half minute), or one JSON object per step on
// stdout. One thread.
class TrainingLog {
 public:
  TrainingLog(LogStyle style, std::int64_t steps, double bytes_per_token);
  ~TrainingLog();
  void step(const StepReport& report);
  // Prints a warning on stderr, below the bar.
  void note(const std::string& text);

 private:
  void draw(const RunProgress& progress, bool now);

  const LogStyle style_;
  const double bytes_per_token_;
  const std::int64_t every_;
  ProgressMeter meter_;
  LinePace pace_;
  std::chrono::steady_clock::time_point drawn_;
  int columns_ = 0;  // of the last bar
};

}  // namespace lockstep

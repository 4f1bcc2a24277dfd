#pragma once

#include <chrono>
#include <optional>
#include <string_view>

#include "lockstep/report/progress.h"

namespace lockstep {

enum class LogStyle { kBar, kPlain, kJson };

std::string_view to_string(LogStyle style);  // "bar", "plain", "json"
std::optional<LogStyle> parse_log_style(std::string_view name);
// A bar where a person sees it, plain lines elsewhere.
LogStyle default_log_style();

// What a person or a program sees of a run: a bar on stderr that is drawn over itself, plain lines
// on stdout (about twenty, and every validation), or one JSON object per step on stdout.
class TrainingLog {
 public:
  TrainingLog(LogStyle style, std::int64_t steps, double bytes_per_token);
  ~TrainingLog();
  void step(const StepReport& report);
  // A line on stderr that is no step's.
  void note(const std::string& text);

 private:
  void draw(const RunProgress& progress, bool now);

  const LogStyle style_;
  const double bytes_per_token_;
  const std::int64_t every_;
  ProgressMeter meter_;
  std::chrono::steady_clock::time_point drawn_;
  bool line_open_ = false;  // a bar stands on the line
};

}  // namespace lockstep

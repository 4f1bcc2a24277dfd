#include "lockstep/report/training_log.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/report/metrics.h"

namespace lockstep {
namespace {

constexpr auto kRedraw = std::chrono::milliseconds(100);
constexpr std::int64_t kPlainLines = 20;

int terminal_width() {
  winsize size{};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

}  // namespace

std::string_view to_string(LogStyle style) {
  switch (style) {
    case LogStyle::kBar: return "bar";
    case LogStyle::kPlain: return "plain";
    case LogStyle::kJson: return "json";
  }
  return "";
}

std::optional<LogStyle> parse_log_style(std::string_view name) {
  for (const LogStyle style : {LogStyle::kBar, LogStyle::kPlain, LogStyle::kJson}) {
    if (name == to_string(style)) return style;
  }
  return std::nullopt;
}

LogStyle default_log_style() {
  return ::isatty(STDERR_FILENO) != 0 ? LogStyle::kBar : LogStyle::kPlain;
}

TrainingLog::TrainingLog(LogStyle style, std::int64_t steps, double bytes_per_token)
    : style_(style),
      bytes_per_token_(bytes_per_token),
      every_(std::max<std::int64_t>(1, steps / kPlainLines)),
      meter_(steps) {}

TrainingLog::~TrainingLog() {
  if (line_open_) std::fputs("\n", stderr);
}

void TrainingLog::step(const StepReport& report) {
  const RunProgress& progress = meter_.update(report);
  switch (style_) {
    case LogStyle::kBar:
      draw(progress, report.validation_loss.has_value() || report.step == progress.steps);
      break;
    case LogStyle::kPlain:
      if (report.step == 1 || report.step % every_ == 0 || report.step == progress.steps ||
          report.validation_loss) {
        fmt::print("{}\n", format_plain(progress));
        std::fflush(stdout);
      }
      break;
    case LogStyle::kJson:
      fmt::print("{}\n", metrics_line(report, bytes_per_token_));
      std::fflush(stdout);
      break;
  }
}

void TrainingLog::note(const std::string& text) {
  if (std::exchange(line_open_, false)) std::fputs("\n", stderr);
  log_line(LogLevel::kWarning, text);
}

void TrainingLog::draw(const RunProgress& progress, bool now) {
  const auto time = std::chrono::steady_clock::now();
  if (!now && line_open_ && time - drawn_ < kRedraw) return;
  drawn_ = time;
  line_open_ = true;
  // Overwrites the line and clears what is left of the old one.
  fmt::print(stderr, "\r{}\x1b[K", format_bar(progress, terminal_width() - 1));
  std::fflush(stderr);
}

}  // namespace lockstep

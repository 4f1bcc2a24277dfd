#include "lockstep/report/training_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "lockstep/base/descriptor.h"
#include "lockstep/base/log.h"
#include "lockstep/report/metrics.h"

namespace lockstep {
namespace {

constexpr auto kRedraw = std::chrono::milliseconds(100);
constexpr std::int64_t kPlainLines = 20;

int terminal_width() {
  winsize size{};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  // A worker's stderr is a pipe to its launcher, which shows the bar on its terminal.
  const Descriptor terminal(::open("/dev/tty", O_RDONLY | O_CLOEXEC | O_NOCTTY));
  if (terminal && ::ioctl(terminal.get(), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    return size.ws_col;
  }
  return 80;
}

// A terminal that is closed is no reason to fail.
void show(const std::string& text) {
  std::fputs(text.c_str(), stderr);
  std::fflush(stderr);
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
  const char* terminal = std::getenv("TERM");
  const bool dumb =
      terminal != nullptr && std::string_view(terminal) == "dumb";  // it takes no control sequences
  return ::isatty(STDERR_FILENO) != 0 && !dumb ? LogStyle::kBar : LogStyle::kPlain;
}

TrainingLog::TrainingLog(LogStyle style, std::int64_t steps, double bytes_per_token)
    : style_(style),
      bytes_per_token_(bytes_per_token),
      every_(std::max<std::int64_t>(1, steps / kPlainLines)),
      meter_(steps) {}

TrainingLog::~TrainingLog() {
  if (set_bar_open(false)) std::fputs("\n", stderr);
}

void TrainingLog::step(const StepReport& report) {
  const RunProgress& progress = meter_.update(report);
  switch (style_) {
    case LogStyle::kBar:
      draw(progress, report.validation_loss.has_value() || report.step == progress.steps);
      break;
    case LogStyle::kPlain:
      if (pace_.due(std::chrono::steady_clock::now(), report.step % every_ == 0 ||
                                                          report.step == progress.steps ||
                                                          report.validation_loss)) {
        print_text(format_plain(progress) + "\n");
      }
      break;
    case LogStyle::kJson: print_text(metrics_line(report, bytes_per_token_) + "\n"); break;
  }
}

void TrainingLog::note(const std::string& text) { log_line(LogLevel::kWarning, text); }

void TrainingLog::draw(const RunProgress& progress, bool now) {
  const auto time = std::chrono::steady_clock::now();
  const bool open = set_bar_open(true);
  if (!now && open && time - drawn_ < kRedraw) return;
  drawn_ = time;
  const int width = terminal_width();
  const std::string bar = format_bar(progress, width - 1);
  // Overwrites the old one and clears what is left of it.
  show(fmt::format("{}{}\x1b[K", over_bar(open ? columns_ : 0, width), bar));
  columns_ = static_cast<int>(bar.size());
}

}  // namespace lockstep

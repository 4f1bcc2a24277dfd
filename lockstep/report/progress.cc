#include "lockstep/report/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace lockstep {
namespace {

constexpr double kWeightOfNewest = 0.1;  // of the speed's moving average
constexpr int kNarrowestBar = 8;
constexpr std::chrono::seconds kLongestPause{30};  // between plain lines

}  // namespace

std::string short_number(double value) {
  constexpr const char* kUnits[] = {"", "k", "M", "G", "T"};
  std::size_t unit = 0;
  while (std::abs(value) >= 999.5 && unit + 1 < std::size(kUnits)) {
    value /= 1000;
    ++unit;
  }
  if (unit == 0) return fmt::format("{:.0f}", value);
  return fmt::format("{:.{}f}{}", value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0, kUnits[unit]);
}

std::string short_duration(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::llround(std::max(0.0, seconds)));
  if (whole < 60) return fmt::format("{}s", whole);
  if (whole < 3600) return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  return fmt::format("{}h{:02}m", whole / 3600, whole / 60 % 60);
}

namespace {

std::string worker_count(const RunProgress& progress) {
  if (progress.workers == 0) return "";
  return fmt::format("  {} worker{}", progress.workers, progress.workers == 1 ? "" : "s");
}

// "  val 2.1034 (41.2 %)", or nothing before the first validation.
std::string validation_words(const RunProgress& progress) {
  if (!progress.validation_loss) return "";
  std::string words = fmt::format("  val {:.4f}", *progress.validation_loss);
  if (progress.validation_accuracy) {
    words += fmt::format(" ({:.1f} %)", 100 * *progress.validation_accuracy);
  }
  return words;
}

}  // namespace

std::string format_bar(const RunProgress& progress, int width) {
  std::string words =
      fmt::format(" {}/{}  loss {:.4f}", progress.step, progress.steps, progress.loss);
  words += validation_words(progress);
  words += fmt::format("  {} tok/s{}  {} left", short_number(progress.tokens_per_second),
                       worker_count(progress), short_duration(progress.seconds_left));
  const int room = width - static_cast<int>(words.size()) - 2;
  if (room < kNarrowestBar) return words.substr(1, static_cast<std::size_t>(std::max(width, 1)));
  const std::int64_t filled =
      progress.steps > 0 ? std::min<std::int64_t>(room, progress.step * room / progress.steps) : 0;
  return fmt::format("[{}{}]{}", std::string(static_cast<std::size_t>(filled), '='),
                     std::string(static_cast<std::size_t>(room - filled), ' '), words);
}

std::string over_bar(int columns_before, int width) {
  const int lines_above = columns_before > 0 ? (columns_before - 1) / std::max(width, 1) : 0;
  if (lines_above == 0) return "\r";
  return fmt::format("\r\x1b[{}A\x1b[J", lines_above);
}

bool LinePace::due(Time now, bool wanted) {
  const bool late = !last_ || now - *last_ >= pause_;
  if (!late && !wanted) return false;
  if (last_ && late) pause_ = std::min(2 * pause_, kLongestPause);
  last_ = now;
  return true;
}

std::string format_plain(const RunProgress& progress) {
  std::string line =
      fmt::format("step {}/{}  loss {:.4f}", progress.step, progress.steps, progress.loss);
  line += validation_words(progress);
  line +=
      fmt::format("  {} tok/s{}", short_number(progress.tokens_per_second), worker_count(progress));
  if (progress.step < progress.steps) {
    line += fmt::format("  {} left", short_duration(progress.seconds_left));
  }
  return line;
}

std::string describe_lanes(std::span<const std::uint32_t> before,
                           std::span<const std::uint32_t> now) {
  std::uint32_t all = 0;
  for (const std::uint32_t lanes : now) all += lanes;
  std::string text;
  for (std::size_t rank = 0; rank < now.size(); ++rank) {
    if (now[rank] == before[rank]) continue;
    text += fmt::format("{} rank {} has {}{} (was {})", text.empty() ? "lanes:" : ",", rank,
                        now[rank], text.empty() ? fmt::format(" of {}", all) : "", before[rank]);
  }
  return text;
}

const RunProgress& ProgressMeter::update(const StepReport& report) {
  if (report.seconds > 0) {  // a step that was done while the workers regrouped has no time
    seconds_per_step_ =
        seconds_per_step_ == 0
            ? report.seconds
            : seconds_per_step_ + kWeightOfNewest * (report.seconds - seconds_per_step_);
  }
  progress_.step = report.step;
  progress_.loss = report.loss;
  if (report.validation_loss) {
    progress_.validation_loss = report.validation_loss;
    progress_.validation_accuracy = report.validation_accuracy;
  }
  if (seconds_per_step_ > 0) {
    progress_.tokens_per_second = static_cast<double>(report.tokens) / seconds_per_step_;
  }
  const auto workers = static_cast<int>(report.lanes.size());
  several_ = several_ || workers > 1;
  progress_.workers = several_ ? workers : 0;
  progress_.seconds_left = static_cast<double>(progress_.steps - report.step) * seconds_per_step_;
  return progress_;
}

}  // namespace lockstep

#include "lockstep/report/metrics_queue.h"

#include <filesystem>
#include <iterator>
#include <sstream>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/files/json.h"

namespace lockstep {
namespace {

// Then the oldest go.
constexpr std::size_t kMostWaiting = 100'000;

std::string name_in(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

}  // namespace

void MetricsQueue::add(Line line) {
  waiting_.push_back(std::move(line));
  if (waiting_.size() > kMostWaiting) waiting_.pop_front();
}

std::string MetricsQueue::waiting(std::size_t most_bytes) const {
  std::size_t bytes = 0;
  auto first = waiting_.end();
  while (first != waiting_.begin()) {
    bytes += std::prev(first)->text.size() + 1;
    if (bytes > most_bytes) break;
    --first;
  }
  std::string lines;
  for (; first != waiting_.end(); ++first) lines += first->text + "\n";
  return lines;
}

void MetricsQueue::put_before(const std::string& lines) {
  std::deque<Line> before;
  std::istringstream words(lines);
  for (std::string text; std::getline(words, text);) {
    const Json json = parse_json(text);
    JsonReader reader(json);
    const bool event = json.contains("event");
    const auto step = static_cast<std::int64_t>(reader.whole("step", INT64_MAX));
    if (reader.problem()) continue;
    before.push_back({event ? std::nullopt : std::optional(step), text, {}});
  }
  waiting_.insert(waiting_.begin(), std::make_move_iterator(before.begin()),
                  std::make_move_iterator(before.end()));
}

void MetricsQueue::write() {
  if (waiting_.empty() || !options_.held()) return;
  const auto now = std::chrono::steady_clock::now();
  if (!file_ && opened_ && now - *opened_ < options_.between_openings) return;
  try {
    write_waiting();
    if (std::exchange(fails_, false)) {
      log(LogLevel::kInfo, "{} is written again", name_in(options_.path));
    }
  } catch (const Error& error) {
    if (!std::exchange(fails_, true)) {
      log(LogLevel::kWarning, "{} cannot be written now, its lines wait and training goes on: {}",
          name_in(options_.path), error.message());
    }
  }
}

void MetricsQueue::write_last() {
  if (waiting_.empty()) return;
  options_.guard.require(options_.path);
  write_waiting();
}

void MetricsQueue::open() {
  opened_ = std::chrono::steady_clock::now();
  const std::string& path = options_.path;
  const WriteGuard& guard = options_.guard;
  file_.emplace(options_.takes_over
                    ? MetricsFile::go_on(path, guard, *options_.storage)
                    : MetricsFile(path, options_.steps_done, guard, *options_.storage));
  options_.takes_over = true;  // when it is opened again
}

void MetricsQueue::write_waiting() {
  if (!file_) open();
  for (; !waiting_.empty(); waiting_.pop_front()) {
    const Line& line = waiting_.front();
    try {
      if (line.step) {
        file_->write_step(*line.step, line.text);
      } else {
        file_->write_event(line.text);
      }
    } catch (const Error&) {
      if (!file_->intact()) file_.reset();  // to be opened after its last complete line
      throw;
    }
    if (line.written) line.written();
  }
}

}  // namespace lockstep

#include "lockstep/report/metrics_queue.h"

#include <cstddef>
#include <filesystem>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"

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

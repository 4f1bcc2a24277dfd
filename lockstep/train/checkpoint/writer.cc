#include "lockstep/train/checkpoint/writer.h"

#include <fmt/format.h>

#include <chrono>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/train/checkpoint/folders.h"

namespace lockstep {

std::string_view to_string(CheckpointPhase phase) {
  switch (phase) {
    case CheckpointPhase::kTraining: return "training";
    case CheckpointPhase::kSaveRequested: return "save requested";
    case CheckpointPhase::kWeightsSynced: return "weights synced";
    case CheckpointPhase::kWriting: return "writing";
    case CheckpointPhase::kComplete: return "complete";
  }
  return "unknown";
}

CheckpointWriter::CheckpointWriter(TrainingState state, Save save)
    : save_(std::move(save)), state_(std::move(state)) {
  // save() keeps what goes wrong; nothing else there throws.
  thread_.start(
      "the checkpoint's thread", [this] { work(); }, [](const Error&) {});
}

CheckpointWriter::~CheckpointWriter() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

CheckpointPhase CheckpointWriter::phase() const {
  const std::lock_guard lock(mutex_);
  return phase_;
}

void CheckpointWriter::set_phase(CheckpointPhase phase) {
  {
    const std::lock_guard lock(mutex_);
    phase_ = phase;
  }
  changed_.notify_all();
}

bool CheckpointWriter::request_save(std::int64_t step, bool wait, Deadline deadline) {
  if (wait) this->wait(deadline);
  log_outcome();
  if (phase() != CheckpointPhase::kTraining) {
    log(LogLevel::kWarning, "{} is skipped: {} is still being written", checkpoint_name(step),
        checkpoint_name(state_.run.step));
    return false;
  }
  state_.run.step = step;
  set_phase(CheckpointPhase::kSaveRequested);
  return true;
}

void CheckpointWriter::write(const Snapshot& snapshot) {
  LOCKSTEP_CHECK(phase() == CheckpointPhase::kSaveRequested);
  set_phase(CheckpointPhase::kWeightsSynced);
  snapshot(state_);
  set_phase(CheckpointPhase::kWriting);
}

void CheckpointWriter::cancel() {
  const std::lock_guard lock(mutex_);
  if (phase_ != CheckpointPhase::kSaveRequested && phase_ != CheckpointPhase::kWeightsSynced)
    return;
  phase_ = CheckpointPhase::kTraining;
}

void CheckpointWriter::finish(Deadline deadline) {
  wait(deadline);
  log_outcome();
  if (!error_.empty()) {
    throw Error(ErrorCode::kIo, "the last checkpoint could not be saved: " + error_);
  }
}

void CheckpointWriter::wait(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const auto written = [this] { return phase_ != CheckpointPhase::kWriting; };
  if (!changed_.wait_until(lock, deadline.time(), written)) {
    throw Error(ErrorCode::kTimeout,
                fmt::format("the checkpoint of step {} is still being written", state_.run.step));
  }
}

void CheckpointWriter::log_outcome() {
  std::optional<Outcome> outcome;
  {
    const std::lock_guard lock(mutex_);
    outcome = std::exchange(outcome_, std::nullopt);
    if (outcome) phase_ = CheckpointPhase::kTraining;
  }
  if (!outcome) return;
  const std::string name = checkpoint_name(state_.run.step);
  error_ = outcome->error;
  if (error_.empty()) {
    log(LogLevel::kInfo, "saved {} ({:.1f} MB in {:.2f} s behind training)", name,
        static_cast<double>(outcome->bytes) / 1e6, outcome->seconds);
  } else {
    log(LogLevel::kWarning,
        "{} could not be saved, earlier ones are untouched and training goes on: {}", name, error_);
  }
}

CheckpointWriter::Outcome CheckpointWriter::save() const {
  const auto begin = std::chrono::steady_clock::now();
  Outcome outcome;
  try {
    outcome.bytes = save_(state_);
  } catch (...) {
    outcome.error = caught_error("the checkpoint's thread").message();
  }
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return outcome;
}

void CheckpointWriter::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return phase_ == CheckpointPhase::kWriting || stopping_; });
    if (phase_ != CheckpointPhase::kWriting) return;
    lock.unlock();
    Outcome outcome = save();
    lock.lock();
    phase_ = outcome.error.empty() ? CheckpointPhase::kComplete : CheckpointPhase::kTraining;
    outcome_ = std::move(outcome);
    changed_.notify_all();
  }
}

}  // namespace lockstep

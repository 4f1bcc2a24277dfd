#include "lockstep/train/checkpoint/checkpoint_writer.h"

#include <fmt/format.h>

#include <chrono>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"

namespace lockstep {

CheckpointWriter::CheckpointWriter(TrainingState snapshot, Write write)
    : write_(std::move(write)), snapshot_(std::move(snapshot)), thread_([this] { work(); }) {}

CheckpointWriter::~CheckpointWriter() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void CheckpointWriter::start() {
  {
    const std::lock_guard lock(mutex_);
    LOCKSTEP_CHECK(!writing_);
    writing_ = true;
    outcome_.reset();
  }
  changed_.notify_all();
}

std::optional<CheckpointWriter::Outcome> CheckpointWriter::take_outcome() {
  const std::lock_guard lock(mutex_);
  return std::exchange(outcome_, std::nullopt);
}

void CheckpointWriter::wait(Deadline deadline) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_until(lock, deadline.time(), [this] { return !writing_; })) {
    throw Error(ErrorCode::kTimeout, fmt::format("the checkpoint of step {} is still being written",
                                                 snapshot_.run.step));
  }
}

void CheckpointWriter::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return writing_ || stopping_; });
    if (!writing_) return;
    lock.unlock();
    const auto begin = std::chrono::steady_clock::now();
    Outcome outcome = {.step = snapshot_.run.step};
    try {
      outcome.bytes = write_(snapshot_);
    } catch (const Error& error) {
      outcome.error = error.message();
    } catch (const std::exception& error) {
      outcome.error = error.what();
    }
    outcome.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    lock.lock();
    writing_ = false;
    outcome_ = std::move(outcome);
    changed_.notify_all();
  }
}

}  // namespace lockstep

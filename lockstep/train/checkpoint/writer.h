#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/base/deadline.h"
#include "lockstep/base/thread.h"
#include "lockstep/train/checkpoint/training_state.h"

namespace lockstep {

// What an observer sees of a checkpoint.
enum class CheckpointPhase {
  kTraining,       // no checkpoint under way
  kSaveRequested,  // the step is chosen; the ranks compare their weights
  kWeightsSynced,  // all ranks have the same weights; the state is being copied
  kWriting,        // the copy is being written while training goes on
  kComplete,       // it is on disk
};
std::string_view to_string(CheckpointPhase phase);

// Saves the states of a run on the rank that writes. Training stops only for a copy of the state; a
// thread of the writer saves the copy while training goes on. One save is under way at a time. A
// save that fails is logged, and the next one may succeed. The owner makes all calls, on one
// thread; phase() may be called on any.
class CheckpointWriter {
 public:
  // Writes a state to disk and returns the bytes written. Throws Error. Runs on the writer's
  // thread.
  using Save = std::function<std::uint64_t(const TrainingState&)>;
  // Copies weights and moments into the buffers of a state.
  using Snapshot = std::function<void(TrainingState&)>;

  // `state` has its buffers; they are filled again for every save.
  CheckpointWriter(TrainingState state, Save save);
  // Waits for the save under way.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Begins a save of this step. False, with a warning, while an earlier save is under way: this one
  // is skipped. With `wait` the earlier one is waited for; throws Error{kTimeout} at the deadline.
  [[nodiscard]] bool request_save(std::int64_t step, bool wait, Deadline deadline);
  // After request_save(), once all ranks have the same weights: calls `snapshot`, then returns
  // while the copy is being written.
  void write(const Snapshot& snapshot);
  // After request_save(), or when the snapshot has failed: nothing will be written. Nothing when no
  // save is at that point.
  void cancel();
  // Logs how the last save went, once it has ended.
  void log_outcome();
  // Waits for the save under way. Throws Error{kTimeout} at the deadline.
  void wait(Deadline deadline);
  // The same, but throws Error{kIo} when the last save has failed.
  void finish(Deadline deadline);

  CheckpointPhase phase() const;
  // The last save that ended, and was logged, has failed. On the owner's thread.
  bool last_failed() const { return !error_.empty(); }

 private:
  struct Outcome {
    std::uint64_t bytes = 0;
    double seconds = 0;
    std::string error = {};  // empty: it is on disk
  };

  void set_phase(CheckpointPhase phase);
  Outcome save() const;
  void work();

  const Save save_;
  TrainingState state_;  // the owner's; the thread's during kWriting
  std::string error_;    // of the last save

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  CheckpointPhase phase_ = CheckpointPhase::kTraining;
  bool stopping_ = false;
  std::optional<Outcome> outcome_;  // not logged yet

  Thread thread_;
};

}  // namespace lockstep

#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/train/checkpoint/checkpoint_files.h"

namespace lockstep {

// Writes states on a thread of its own, one at a time, while its owner trains on. The owner's
// thread makes all calls.
class CheckpointWriter {
 public:
  // Returns the bytes written, or throws Error. Called on the writer's thread.
  using Write = std::function<std::uint64_t(const TrainingState&)>;
  struct Outcome {
    std::int64_t step = 0;
    std::uint64_t bytes = 0;
    double seconds = 0;
    std::string error = {};  // empty: it is on disk
  };

  // `snapshot` has its buffers; they are kept and filled again for every write.
  CheckpointWriter(TrainingState snapshot, Write write);
  // Waits for the write under way.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // What is to be written next; the caller's between writes.
  TrainingState& snapshot() { return snapshot_; }
  void start();
  // How the write that was started ended, once; nothing while it goes on or when there is none.
  std::optional<Outcome> take_outcome();
  // Waits for it. Throws Error{kTimeout} when it goes on past the deadline.
  void wait(Deadline deadline);

 private:
  void work();

  // Constant after construction.
  const Write write_;
  // The owner's, or while writing_ the thread's.
  TrainingState snapshot_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool writing_ = false;
  bool stopping_ = false;
  std::optional<Outcome> outcome_;

  std::thread thread_;
};

}  // namespace lockstep

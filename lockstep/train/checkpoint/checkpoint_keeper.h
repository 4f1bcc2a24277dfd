#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/train/checkpoint/checkpoint.h"
#include "lockstep/train/checkpoint/checkpoint_phases.h"
#include "lockstep/train/checkpoint/checkpoint_writer.h"

namespace lockstep {

struct CheckpointPolicy {
  std::string out = {};
  std::int64_t save_every = 0;  // 0: never; else also after the last step
  std::int64_t keep_last = 3;   // 0: all
  bool wait = false;            // for every write, so that no save is ever skipped
  std::int64_t last_step = 0;
  std::uint32_t world_size = 1;
  std::vector<std::int64_t> known_bad = {};  // checkpoints that could not be read
};

// When to save and what becomes of it, on the rank that writes. A save that falls due while another
// is being written is skipped and told; the final one waits. A save that fails is told and training
// goes on, but for the final one. One thread.
class CheckpointKeeper {
 public:
  // Copies the weights and moments into the state's buffers.
  using Snapshot = std::function<void(TrainingState&)>;

  // `state` is that of the first step of this run. Memory for a copy of it is taken now.
  CheckpointKeeper(CheckpointPolicy policy, RunState state,
                   std::shared_ptr<const Tokenizer> tokenizer);

  // Whether `step` steps done is when a checkpoint is to be made. `stopping`: no step follows.
  bool due(std::int64_t step, bool stopping) const;
  // Whether a save of this step may begin, by whatever is still being written. The final one waits.
  [[nodiscard]] bool begin(std::int64_t step, bool final, Deadline deadline);
  // A rank has the weights of this step. Once per rank.
  void worker_ready(std::uint32_t rank) { phases_.worker_ready(rank, phases_.checkpoint_step()); }
  // Once all ranks are ready: copies the state and writes it behind training.
  void write(const Snapshot& snapshot);
  // All of it for the only worker of a run.
  void after_step(std::int64_t step, bool stopping, const Snapshot& snapshot, Deadline deadline);
  // Waits for what is being written. Throws Error{kIo} when the last save did not succeed.
  void finish(Deadline deadline);

  CheckpointPhase phase() const { return phases_.phase(); }
  // How long training stood still for copies, and for writes that it waited for.
  double stalled_seconds() const { return stalled_seconds_; }

 private:
  void look_after_writer();

  const CheckpointPolicy policy_;
  CheckpointPhases phases_;
  CheckpointWriter writer_;
  std::int64_t latest_step_;  // of the last save that was begun, or of the one resumed from
  std::string error_;         // of the last save, when it failed
  double stalled_seconds_ = 0;
};

// The state to go on from, when a run is resumed.
struct ResumePoint {
  TrainingState state;
  std::vector<std::int64_t> known_bad;
};
// Looks into `out` before anything is written there. With `resume`: the newest intact checkpoint,
// or nothing when there is none at all; without: throws Error{kInvalidArgument} when there are
// checkpoints, because they would be lost.
std::optional<ResumePoint> find_resume_point(const std::string& out, bool resume);
// Throws Error{kInvalidArgument} when `now` is another run than the one that was saved; warns when
// it is the same and will go on otherwise than it would have.
void require_same_run(const RunState& saved, const RunState& now);

}  // namespace lockstep

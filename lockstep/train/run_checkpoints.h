#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/train/checkpoint/writer.h"
#include "lockstep/train/trainer.h"

namespace lockstep {

// A disk that takes longer than this for one checkpoint is given up.
constexpr auto kDiskPatience = std::chrono::hours(1);

struct CheckpointPolicy {
  std::string out = {};
  std::int64_t save_every = 0;  // steps; 0: never. Otherwise also after the last step.
  std::int64_t keep_last = 3;   // 0: all
  bool wait = false;            // for every write, so that no save is skipped
  std::int64_t last_step = 0;
  std::vector<std::int64_t> damaged = {};  // steps of checkpoints that could not be read
};

// Whether a checkpoint is due after `step` steps: every `save_every`, and after the last. Pure.
bool should_save_checkpoint(std::int64_t step, std::int64_t save_every, std::int64_t last_step);

// What a checkpoint records of the trainer's run, at the step where it stands.
RunState run_state_of(const Trainer& trainer);

// Saves the checkpoints of a run. The ranks agree on the step and compare the hashes of their
// weights before anything is written. Shards of the moments are gathered on rank 0, which alone
// writes, while all train on: the disk need not be shared. All calls are collective.
class RunCheckpoints {
 public:
  // On rank 0 memory for a copy of the state is allocated now. The trainer must outlive this.
  RunCheckpoints(Trainer& trainer, const CheckpointPolicy& policy,
                 std::shared_ptr<const Tokenizer> tokenizer);

  // After every step. `stopping`: no step follows. Saves if a checkpoint is due. It is skipped,
  // with a warning, while the one before is still being written; the last one waits for that.
  // Throws Error{kReplicaMismatch} on all ranks when their weights differ.
  void after_step(bool stopping);
  // After the last step: saves unless this step is saved, and waits on rank 0 until the files are
  // on disk. Throws Error{kIo} there when that failed.
  void finish();

  // What rank 0 is doing; kTraining on the others.
  CheckpointPhase phase() const { return writer_ ? writer_->phase() : CheckpointPhase::kTraining; }

 private:
  bool agree_to_save(std::int64_t step, bool final);

  Trainer& trainer_;
  const CheckpointPolicy policy_;
  std::int64_t latest_step_;                // for which a save was due, or from which we resumed
  std::optional<CheckpointWriter> writer_;  // on rank 0
};

}  // namespace lockstep

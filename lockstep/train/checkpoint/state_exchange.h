#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include "lockstep/train/checkpoint/checkpoint_keeper.h"
#include "lockstep/train/trainer.h"

namespace lockstep {

// A run's state among its workers. Only rank 0 reads and writes files, so no disk need be shared;
// everything else travels over the communicator. All calls are collective.

// A disk that takes longer than this for one checkpoint is taken for dead.
constexpr auto kDiskPatience = std::chrono::hours(1);

// What a run is resumed from, as every rank knows it.
struct SharedResume {
  std::optional<RunState> run;       // on all ranks
  std::optional<ResumePoint> point;  // on rank 0
};
// Rank 0 calls `find`; what it finds or throws, all ranks get.
SharedResume share_resume_point(Communicator& communicator,
                                const std::function<std::optional<ResumePoint>()>& find);

// What checkpoints record of a run that is about to begin.
RunState run_state_of(const TrainerOptions& options, const Samples& training);

// Before Trainer::start(): the steps, on rank 0 the weights, and on every rank its moments. Throws
// Error{kInvalidArgument} on all ranks when `now` is another run than the one that was saved.
void restore_state(Trainer& trainer, SharedResume& resume, const RunState& now);

// The weights and all moments of the run into `snapshot`, which rank 0 has.
void collect_state(Trainer& trainer, TrainingState* snapshot);

// Saves a run of several workers: they agree that they have the same weights before anything is
// written; then rank 0 writes and all go on.
class RunCheckpoints {
 public:
  RunCheckpoints(Trainer& trainer, const CheckpointPolicy& policy, const RunState& run,
                 std::shared_ptr<const Tokenizer> tokenizer);

  // `stopping`: no step follows.
  void after_step(bool stopping);
  // After the last step: saves what is not saved, and waits on rank 0 until it is on disk.
  void finish();

 private:
  bool agree_to_save(std::int64_t step, bool final);

  Trainer& trainer_;
  const CheckpointPolicy policy_;
  std::int64_t latest_step_;                // that a save was due for
  std::optional<CheckpointKeeper> keeper_;  // on rank 0
};

}  // namespace lockstep

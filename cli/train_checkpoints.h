#pragma once

#include <memory>
#include <optional>

#include "cli/train_options.h"
#include "lockstep/train/checkpoint_keeper.h"
#include "lockstep/train/trainer.h"

namespace lockstep::cli {

// The point to go on from, as --resume and --out say; before anything is written.
std::optional<ResumePoint> resume_point(const TrainOptions& options);

// What checkpoints record of a run that is about to begin.
RunState run_state(const TrainerOptions& how, const Samples& training);

// Puts the state into the trainer and gives its memory back.
void restore(Trainer& trainer, ResumePoint& point, const RunState& now);

// Saves a trainer's state as --save-every and --keep-last say.
class TrainCheckpoints {
 public:
  TrainCheckpoints(const TrainOptions& options, RunState run,
                   std::shared_ptr<const Tokenizer> tokenizer, std::vector<std::int64_t> known_bad);

  void after_step(Trainer& trainer) { save(trainer, false); }
  // When no more steps follow, for whatever reason: saves the last state, waits until it is there.
  void finish(Trainer& trainer);

 private:
  void save(Trainer& trainer, bool stopping);

  CheckpointKeeper keeper_;
};

}  // namespace lockstep::cli

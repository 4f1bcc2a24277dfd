#pragma once

#include <optional>

#include "cli/train_options.h"
#include "lockstep/data/samples.h"
#include "lockstep/train/model_files.h"
#include "lockstep/train/trainer.h"

namespace lockstep::cli {

// What a run does, when the options and the data are known; every worker finds the same.
struct TrainPlan {
  DataSource data;
  std::optional<SavedModel> init;
  TrainerOptions how;
  Samples training;
  Samples validation;
  bool gpu = false;
};

// Throws Error{kInvalidArgument} for options that do not go together, Error{kIo} for files that
// cannot be read.
TrainPlan make_train_plan(const TrainOptions& options);

std::uint64_t tokens_in(const std::vector<TokenShard>& shards);

}  // namespace lockstep::cli

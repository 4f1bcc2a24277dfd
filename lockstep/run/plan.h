#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "lockstep/data/samples.h"
#include "lockstep/run/options.h"
#include "lockstep/train/formats/model_files.h"
#include "lockstep/train/resume.h"
#include "lockstep/train/trainer.h"

namespace lockstep {

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
// cannot be read. A run that goes on has the model, the tokenizer and the skipped lanes of the one
// that was saved, and its sizes and schedule where no others are given.
TrainPlan make_train_plan(const TrainOptions& options, const ResumePoint& resume = {});

// Why a run cannot have this precision: neither a GPU is used, nor does the processor have it.
// Pure.
std::optional<std::string> precision_refusal(Precision precision, bool gpu, bool processor);

// A halt.json that names a lane. Throws Error{kIo} or Error{kInvalidArgument} with the file.
HaltReport read_halt_report(const std::string& path);

std::uint64_t tokens_in(std::span<const TokenShard> shards);

}  // namespace lockstep

#pragma once

#include <string>
#include <vector>

#include "lockstep/run/options.h"

namespace lockstep {

// A whole training run, from its options to its model. Under a launcher this process is one worker;
// otherwise it runs the workers that are asked for, as threads, or as processes that are this
// program with these `arguments` once more. Returns the exit code: 0, or 128 + the signal that
// stopped it; as a launcher of workers, theirs. Throws Error{kInvalidArgument} for options that do
// not go together, else what ended the run.
int train(const TrainOptions& options, const std::vector<std::string>& arguments);

// Computes the lanes that options.replay names once more and tells what is not finite in them.
// Returns 3 if something is not, 0 if all of it is.
int replay_lane(const TrainOptions& options);

}  // namespace lockstep

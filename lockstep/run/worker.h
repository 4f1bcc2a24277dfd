#pragma once

#include "lockstep/run/options.h"

namespace lockstep {

// All that one worker does, from the plan to the model. Rank 0 talks to people and writes files.
// Returns the exit code.
int train_worker(const TrainOptions& options, Job& job);

}  // namespace lockstep

#pragma once

#include "lockstep/run/options.h"

namespace lockstep {

// From now on the first SIGINT or SIGTERM stops this process's workers after the step under way;
// the second one ends the process.
void stop_on_signals();

// All that one worker does, from the plan to the model. Rank 0 talks to people and writes files.
// Returns the exit code.
int train_worker(const TrainOptions& options, Job& job);

}  // namespace lockstep

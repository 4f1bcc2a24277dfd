#pragma once

#include <atomic>

#include "lockstep/run/options.h"

namespace lockstep {

// Set by the first SIGINT or SIGTERM to the signal's number; the second one ends the process.
void stop_on_signals();
std::atomic<int>& stopped_by();

// All that one worker does, from the plan to the model. Rank 0 talks to people and writes files.
// Returns the exit code.
int train_worker(const TrainOptions& options, Job& job);

}  // namespace lockstep

#pragma once

#include <atomic>

#include "cli/train_options.h"
#include "lockstep/comm/communicator.h"

namespace lockstep::cli {

// Set by the first SIGINT or SIGTERM to the signal's number; the second one ends the process.
void stop_on_signals();
std::atomic<int>& stopped_by();

// The whole job of one worker. Rank 0 talks to people and writes files. Returns the exit code.
int train_worker(const TrainOptions& options, Communicator& communicator);

}  // namespace lockstep::cli

#pragma once

#include "lockstep/run/flight_watch.h"
#include "lockstep/run/options.h"

namespace lockstep {

// All that one worker does, from the plan to the model. Rank 0 talks to people and writes files.
// Returns the exit code. `watch` writes what the worker did last when it, or another one, fails.
int train_worker(const TrainOptions& options, Job& job, FlightWatch& watch);

// The exit code of a worker that leaves its job in order before the end.
int code_of_leaving();

}  // namespace lockstep

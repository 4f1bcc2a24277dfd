#pragma once

#include <string>

#include "lockstep/train/trainer.h"

namespace lockstep {

// From now on SIGINT or SIGTERM stops this process's workers after the step under way, and SIGUSR1
// has all workers save a checkpoint after it. A second SIGINT or SIGTERM ends the process; the same
// one within a second is still the first. With `tell` stderr says so at once; ranks of our launcher
// leave that to the launcher.
void listen_to_signals(bool tell);

// What the signals ask for. A save is asked for once, by whichever worker of the process comes
// first. Any thread.
Requests requests_of_signals();

// The newest checkpoint, to be named by the signal that ends the process. Any thread.
void note_checkpoint(const std::string& path);

}  // namespace lockstep

#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "lockstep/train/trainer.h"

namespace lockstep {

// What SIGTERM means: the end of the run, or that this worker alone leaves it (a preemption).
enum class TermMeaning { kStop, kLeave };

// From now on SIGINT stops the run after the step under way, with a checkpoint, and so does SIGHUP
// (its terminal is closed) unless it is ignored; SIGTERM does the same or has this process leave,
// and SIGUSR1 has all workers save a checkpoint. A second signal to stop ends the process; the same
// one within a second is still the first. With `tell` stderr says so at once; ranks of our launcher
// leave that to the launcher.
void listen_to_signals(bool tell, TermMeaning term = TermMeaning::kStop);

// This process is a newcomer, and has no part in the run until that begins: SIGTERM then ends it at
// once with this code, if it means that this worker leaves.
void note_waits_to_enter(int code);

// The job has formed, and this process is in it. Until then there is no step to wait for, so that
// the first signal to stop ends the process.
void note_run_begins();

// What the signals ask for. A save is asked for once, by whichever worker of the process comes
// first. Any thread.
Requests requests_of_signals();

// Whether this process is to leave: 0 no, 1 it was asked to, 2 that was a second ago or more, so
// that others which were asked at the same time have heard of it too. Pure; `asked` is when.
int leave_request(std::optional<std::chrono::steady_clock::time_point> asked,
                  std::chrono::steady_clock::time_point now);

// The newest checkpoint, to be named by the signal that ends the process. Any thread.
void note_checkpoint(const std::string& path);

}  // namespace lockstep

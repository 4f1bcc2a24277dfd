#pragma once

#include <cstdint>

#include "lockstep/comm/communicator.h"
#include "lockstep/train/trainer.h"

namespace lockstep {

// What level() has done, the same on all ranks.
struct Levelled {
  // No whole state was left: moments of some range, or everything. The trainer is attached and
  // stands at step 0 without a state: the caller restores a checkpoint, or sets the parameters on
  // rank 0, then calls Trainer::start().
  bool lost = false;
  std::int64_t step = 0;  // steps done: the run goes on after this one
  // bf16 on the wire: rounding errors of the last step were not added, so the result is another one
  // than that of a run in which nothing happened.
  bool residuals_lost = false;
};

// Makes the standing of all ranks of a new generation the same, and attaches the trainer to its
// communicator. Collective. Who is behind, and newcomers, get parameters, moments and the last
// report from those that are furthest; shards of moments go to the ranks that hold them now. What
// comes is complete and its hashes are right before it replaces a state. Nobody goes back while a
// whole state is ahead.
//
// With shards a step is done by all survivors once one of them knows its norm: the others have
// their sums, take the norm from it and make their updates. When none knows it, no survivor has
// changed anything, and the step is computed again.
//
// The trainer is detached. After an Error of the communicator: detach(), and level() in the next
// generation; nothing that was whole before is lost by it. Throws Error{kPeerLost} that names this
// rank when what it got is damaged.
Levelled level(Trainer& trainer, Communicator& communicator);

}  // namespace lockstep

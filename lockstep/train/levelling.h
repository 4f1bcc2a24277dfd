#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/base/range.h"
#include "lockstep/train/reducer.h"
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

// The parts of level() that are pure.

// Where a rank stands, as it tells the others.
struct LevelStanding {
  struct Moments {
    Range range;
    std::int64_t step = 0;
  };
  bool has_state = false;
  std::int64_t step = 0;
  // With shards, of step + 1: the sum is held in `held`, the norm is known, the update is made.
  bool summed = false;
  bool decided = false;
  bool updated = false;
  Range held;
  // Of the boundary after `step`.
  int done = 0;  // how much of it: its parts are done in this order
  bool closed = false;
  std::vector<Moments> moments;
};

// These elements go from a rank to a rank; what stays on a rank is among them.
struct StateTransfer {
  int from = 0;
  int to = 0;
  Range range;
  bool operator==(const StateTransfer&) const = default;
};

struct LevelPlan {
  bool lost = false;
  std::int64_t step = 0;      // where all will stand
  bool closed = false;        // the boundary after it is done on all ranks
  int teller = -1;            // knows the report of that step, and the norm where others need it
  std::vector<bool> updates;  // by rank: makes the update of the step from the sum it holds
  std::vector<StateTransfer> parameters;
  std::vector<StateTransfer> moments;
};

// `size` is that of the flat buffers.
LevelPlan plan_levelling(std::span<const LevelStanding> ranks, std::size_t size,
                         const ReducerOptions& reducer);

}  // namespace lockstep

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/base/range.h"
#include "lockstep/train/reducer.h"

namespace lockstep {

// Who gets what from whom in level(), from what the ranks tell of themselves. Pure.

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

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/train/step_report.h"

namespace lockstep {

// The rule by which lanes move.
struct LaneBalanceOptions {
  std::int64_t warmup = 2;  // steps after a deal that do not count: memory and caches are cold
  std::int64_t window = 8;  // steps that a decision looks at, at least
  double seconds = 1.0;     // and their computing time on the slowest rank, at least
  double gain = 0.05;       // a new deal must promise a step that is shorter by this share
};

// The lanes of a worker as `counts[rank]`, for reports.
std::vector<std::uint32_t> lanes_by_rank(const LeafOwners& owners, int world_size);

// How many accumulators each rank needs with these owners.
std::vector<std::uint32_t> accumulators_by_rank(const LeafOwners& owners, int world_size);
// How many every rank has so that lanes can move, where these are the owners at the start: one more
// than the rank that needs most.
std::uint32_t most_accumulators(const LeafOwners& owners, int world_size);

// The deal that is expected to make the shortest step: every rank has a run of lanes, in the order
// of ranks, of one lane at least and for which it needs at most most_accumulators[rank]
// accumulators. A step lasts as long as its slowest rank computes, and `seconds_per_partial` for
// every partial of all ranks. Empty when no such deal was found. There are at least as many lanes
// as ranks. Pure.
LeafOwners deal_lanes(std::size_t lanes, std::span<const double> seconds_per_lane,
                      std::span<const std::uint32_t> most_accumulators, double seconds_per_partial);

// Decides who owns which lanes, so that slow ranks get fewer. It sees nothing but the phase times
// that the tail of a step brings to all ranks, so all ranks decide alike without a message. No I/O,
// no clock.
//
// The owners at the start are kept until a window of steps has passed. Then each rank's computing
// time per lane gives a new deal. It is taken if it promises a step that is shorter by `gain` in
// each quarter of the window by itself: one slow moment moves nothing. Communication counts as the
// least that any rank spent on it (a rank that spends more waits for others), in proportion to the
// number of partials. The window after a move checks the promise: if steps have not become shorter,
// the old deal comes back, and the next try waits for 2, 4, ... up to 64 windows. No rank ever
// needs more than most_accumulators().
class LaneBalance {
 public:
  LaneBalance(LeafOwners owners, int world_size, const LaneBalanceOptions& options = {});

  // Of the next step.
  const LeafOwners& owners() const { return owners_; }
  // A step with these owners has taken these times, by rank. Returns whether the owners of the next
  // step are others.
  bool add_step(std::span<const PhaseTimes> phases);

 private:
  struct Step {
    std::vector<double> compute;  // seconds by rank
    double communication = 0;     // of the rank that waited least
    double total = 0;
  };
  struct Times {
    std::vector<double> per_lane;  // seconds by rank
    double communication = 0;      // seconds of a step
    double total = 0;
  };
  Times mean(std::span<const Step> steps) const;
  double expected(const LeafOwners& owners, const Times& times) const;
  bool promises(const LeafOwners& owners, const Times& times) const;
  bool decide();
  bool change_to(LeafOwners owners);

  const LaneBalanceOptions options_;
  const int world_size_;
  const std::vector<std::uint32_t> most_accumulators_;  // by rank
  LeafOwners owners_;
  std::int64_t to_skip_;
  std::vector<Step> window_;
  double window_seconds_ = 0;
  // The deal before the last move, and how long its steps took, until the move has kept its
  // promise.
  LeafOwners before_;
  double before_seconds_ = 0;
  std::int64_t pause_ = 0;       // windows, after the last move that was taken back
  std::int64_t pause_left_ = 0;  // windows
};

}  // namespace lockstep

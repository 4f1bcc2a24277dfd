#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/base/thread_pool.h"
#include "lockstep/comm/buffer.h"
#include "lockstep/model/batch.h"
#include "lockstep/model/layout.h"

namespace lockstep {

// How a worker adds up its lanes. A lane's gradient is computed into an accumulator, a buffer of
// the size of the model; then accumulators are merged as soon as both halves of a node of T(0, V)
// are complete, so that few are open at once. Plain data, computed by a pure function.
struct LaneWork {
  std::uint32_t lane = 0;
  std::uint32_t accumulator = 0;         // where its gradient is computed
  std::vector<AccumulatorMerge> merges;  // once it is there, in this order
};
struct LaneSchedule {
  std::vector<LaneWork> lanes;  // in the order in which they are to be computed
  std::vector<Range> partials;  // the worker's maximal nodes; partial i ends up in accumulator i
  // At most the partials, and floor(log2(n)) for the n lanes of the largest.
  std::uint32_t accumulators = 0;
};

// For the maximal nodes of one worker, as owned_nodes() gives them.
LaneSchedule schedule_lanes(std::span<const Range> partials);

// The accumulators of a schedule and their sums. ready() may be told of a lane's gradient piece by
// piece, while the rest is still being computed. One thread at a time.
class GradientTree {
 public:
  // Where the accumulators come from; a communicator's allocate() gives memory that others read
  // directly.
  using Allocate = std::function<Buffer(std::size_t bytes)>;

  GradientTree(LaneSchedule schedule, std::size_t size, const Allocate& allocate, ThreadPool& pool);

  const LaneSchedule& schedule() const { return schedule_; }
  // Where the gradient of the `index`-th lane of the schedule goes. It may overwrite all of it once
  // the lanes before are done.
  std::span<float> lane_gradient(std::size_t index) {
    return accumulator(schedule_.lanes[index].accumulator);
  }
  // Elements `range` of that gradient are final: adds them to the open sums.
  void ready(std::size_t index, Range range);
  // The sum over the lanes of a partial, when all of them are done.
  std::span<float> partial(std::size_t index) { return accumulator(index); }

 private:
  std::span<float> accumulator(std::size_t index) { return accumulators_[index].as<float>(); }

  LaneSchedule schedule_;
  std::vector<Buffer> accumulators_;
  ThreadPool& pool_;
};

}  // namespace lockstep

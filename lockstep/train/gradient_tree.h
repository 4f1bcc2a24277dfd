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

// How a worker adds up its lanes. The gradient of a lane is computed into an accumulator, a buffer
// of the size of the model. Two accumulators are merged as soon as both halves of a node of T(0, V)
// are complete, so that few are in use at once. Plain data.
struct LaneWork {
  std::uint32_t lane = 0;
  std::uint32_t place = 0;               // of the lane among the worker's, in lane order
  std::uint32_t accumulator = 0;         // gets the gradient of the lane
  std::vector<AccumulatorMerge> merges;  // follow the gradient, in this order
};
struct LaneSchedule {
  std::vector<LaneWork> lanes;     // in the order in which they are to be computed
  std::vector<Range> partials;     // the worker's maximal nodes; partial i ends up in accumulator i
  std::uint32_t accumulators = 0;  // how many there are
};

// How many accumulators a worker needs for its maximal nodes. Large nodes come first, while few
// partials are finished: the i-th node (from 0) of n lanes needs floor(log2(n)) + 1 and those of
// the i before it. Pure.
std::uint32_t accumulators_for(std::span<const Range> partials);
// The schedule for the maximal nodes of one worker, as owned_nodes() returns them. Pure.
LaneSchedule schedule_lanes(std::span<const Range> partials);

// The accumulators of a schedule on the CPU. One thread at a time.
class GradientTree {
 public:
  // Allocates the accumulators; memory of Communicator::allocate() can be read by other ranks
  // directly.
  using Allocate = std::function<Buffer(std::size_t bytes)>;

  // There are `accumulators` at least.
  GradientTree(LaneSchedule schedule, std::size_t size, const Allocate& allocate, ThreadPool& pool,
               std::uint32_t accumulators = 0);

  const LaneSchedule& schedule() const { return schedule_; }
  // Between steps. The schedule needs no more accumulators than there are.
  void set_schedule(LaneSchedule schedule);
  std::size_t accumulators() const { return accumulators_.size(); }
  // The accumulator for the gradient of lane `index` of the schedule. It may be overwritten once
  // the lanes before it are done.
  std::span<float> lane_gradient(std::size_t index) {
    return accumulator(schedule_.lanes[index].accumulator);
  }
  // Elements `range` of that gradient are final: merges them. Other ranges may still be computed.
  void ready(std::size_t index, Range range);
  // Partial `index`, when all of its lanes are done.
  std::span<float> partial(std::size_t index) { return accumulator(index); }

 private:
  std::span<float> accumulator(std::size_t index) { return accumulators_[index].as<float>(); }

  LaneSchedule schedule_;
  std::vector<Buffer> accumulators_;
  ThreadPool& pool_;
};

}  // namespace lockstep

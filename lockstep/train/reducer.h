#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/train/gradient_tree.h"

namespace lockstep {

// What travels beside the gradient: summed in f64 along the same tree.
struct Tail {
  double loss = 0;    // sum over tokens
  double tokens = 0;  // that counted
};

struct ReducedStep {
  std::span<const float> gradient;  // the sum over all lanes of the step, never scaled
  Tail tail;
};

// Where the model meets the other workers: lanes go in as the backward pass finishes their ranges,
// the sum over the whole step comes out. This one has all lanes to itself. One thread at a time.
class GradientReducer {
 public:
  GradientReducer(std::uint32_t lanes, std::size_t size, ThreadPool& pool);

  // The lanes of this worker, in the order in which it must compute them.
  std::uint32_t lane_count() const { return static_cast<std::uint32_t>(tails_.size()); }
  std::uint32_t lane(std::size_t index) const { return tree_.schedule().lanes[index].lane; }
  std::span<float> lane_gradient(std::size_t index) { return tree_.lane_gradient(index); }

  void ready(std::size_t index, Range range) { tree_.ready(index, range); }
  void lane_done(std::size_t index, const Tail& tail) { tails_[index] = tail; }
  // When every lane is done. The result is valid until the next lane_gradient().
  ReducedStep finish(Deadline deadline);

  // Buffers of the size of the gradient that are held.
  std::uint32_t slots() const { return tree_.schedule().slots; }

 private:
  GradientTree tree_;
  std::vector<Tail> tails_;
};

// Along T(0, tails.size()).
Tail sum_tails(std::span<const Tail> tails);

}  // namespace lockstep

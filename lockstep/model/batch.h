#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <span>

#include "lockstep/base/range.h"

namespace lockstep {

// Sequences of equal length, one after the other. A target below 0 is ignored: it adds neither to
// the loss nor to the gradient nor to the count.
struct Batch {
  std::span<const std::int32_t> tokens;
  std::span<const std::int32_t> targets;
  int rows = 0;
  int context = 0;
};

// Throws Error{kInvalidArgument} unless there is room for the batch and all ids are in the
// vocabulary.
void check_batch(const Batch& batch, int max_rows, int max_context, int vocab);

// Sums over tokens, never means.
struct LossSum {
  double loss = 0.0;
  std::int64_t tokens = 0;   // those that counted
  std::int64_t correct = 0;  // of them: the model holds no other token for likelier than the target
};

// What one lane, a micro-batch, gives on any device.
struct LaneResult {
  LossSum sum;
  double forward_seconds = 0;  // of the device's time
  double backward_seconds = 0;
};

// Gradients of lanes are computed into accumulators, buffers of the size of the model. A merge adds
// one accumulator to another: into = into + from.
struct AccumulatorMerge {
  std::uint32_t into = 0;
  std::uint32_t from = 0;
  auto operator<=>(const AccumulatorMerge&) const = default;
};

// Called on the caller's thread when a range of the flat gradient is final: every element is in
// exactly one range, and the ranges come in ascending order.
using RangeReady = std::function<void(Range)>;

// Sorts the places of a batch by token, keeping their order: those of token t are
// places[begin[t]] to places[begin[t + 1]]. `begin` has one element more than the vocabulary.
void index_tokens(std::span<const std::int32_t> tokens, std::span<std::uint32_t> begin,
                  std::span<std::uint32_t> places);

}  // namespace lockstep

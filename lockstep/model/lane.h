#pragma once

#include <compare>
#include <cstdint>

#include "lockstep/model/transformer.h"

namespace lockstep {

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

}  // namespace lockstep

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace lockstep {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  // decoupled; not on norms
};

// One step of the optimizer: the sum of token gradients becomes a mean, is clipped, and AdamW takes
// it. Nothing is changed when the norm or a loss of the step is not finite, or there are no tokens.
struct UpdateRequest {
  std::int64_t tokens = 0;  // of all workers
  double clip = 0;          // longest gradient; 0: any
  double learning_rate = 0;
  std::int64_t step = 0;            // from 0
  std::optional<double> norm = {};  // of the sum, where it is known already
};

struct UpdateResult {
  double norm = 0;  // of the sum, before clipping
  bool done = false;
};

// The global norm of a gradient: f64 sums of squares over blocks of kNormBlock elements, counted
// from element 0 of the flat buffer, added in the canonical tree. Not finite when and only when an
// element is not finite. The same bits on every processor, for any threads and any sharding at
// block boundaries.
constexpr std::size_t kNormBlock = 4096;

constexpr std::size_t norm_blocks(std::size_t elements) {
  return (elements + kNormBlock - 1) / kNormBlock;
}

// What turns the sum of token gradients, of this norm, into the gradient that the optimizer sees:
// f32(min(1, clip / (norm / tokens)) / tokens), computed in f64. No clipping when `clip` is 0.
inline float gradient_factor(double norm, std::int64_t tokens, double clip) {
  const auto count = static_cast<double>(tokens);
  const double scale = clip > 0.0 ? std::min(1.0, clip / (norm / count)) : 1.0;
  return static_cast<float>(scale / count);
}

}  // namespace lockstep

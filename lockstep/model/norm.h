#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lockstep/base/thread_pool.h"

namespace lockstep {

// The global norm of a gradient: f64 sums of squares over blocks of kNormBlock elements, counted
// from element 0 of the flat buffer, added in the canonical tree. Not finite when and only when an
// element is not finite. The same bits on every processor, for any threads and any sharding at
// block boundaries.
constexpr std::size_t kNormBlock = 4096;

constexpr std::size_t norm_blocks(std::size_t elements) {
  return (elements + kNormBlock - 1) / kNormBlock;
}

// The sums of squares of the blocks of `values`, the last of which may be short. `values` begins at
// a block boundary of the flat buffer; `sums` has norm_blocks(values.size()) elements.
void block_squares(std::span<const float> values, ThreadPool& pool, std::span<double> sums);

// The tree over those sums (canonical_tree.h); `sums` is scratch of norm_blocks(values.size())
// elements.
double sum_of_squares(std::span<const float> values, ThreadPool& pool, std::span<double> sums);

// What turns the sum of token gradients, of this norm, into the gradient that the optimizer sees:
// f32(min(1, clip / (norm / tokens)) / tokens), computed in f64. No clipping when `clip` is 0.
float gradient_factor(double norm, std::int64_t tokens, double clip);

}  // namespace lockstep

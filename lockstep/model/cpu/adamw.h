#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/base/float_buffer.h"
#include "lockstep/base/thread_pool.h"
#include "lockstep/model/layout.h"
#include "lockstep/model/update.h"

namespace lockstep {

// AdamW over a range of the flat buffers, in one pass. An element's result depends on its operands
// alone, and the bits are the same on every processor:
//   g = sum × factor,  m = β₁·m + (1−β₁)·g,  v = β₂·v + (1−β₂)·(g·g),
//   p = p·(1 − rate·decay) − (rate/(1−β₁ᵗ))·m / (√v·(1/√(1−β₂ᵗ)) + ε),  t = step + 1,
// each operation rounded to f32 and each scalar computed in f64 and rounded once.
class AdamW {
 public:
  // Moments for `range` only, which a sharded optimizer may choose; all of it unless told.
  AdamW(const ParameterLayout& layout, const AdamWOptions& options);
  AdamW(const ParameterLayout& layout, const AdamWOptions& options, Range range);

  // Updates parameters[range], of a whole flat buffer, from `gradient_sum`, which is that of the
  // range alone. `step` counts from 0. No heap.
  void step(std::span<float> parameters, std::span<const float> gradient_sum, float factor,
            double learning_rate, std::int64_t step, ThreadPool& pool);

  const AdamWOptions& options() const { return options_; }
  Range range() const { return range_; }
  // Element i belongs to element range().begin + i of the flat buffers.
  std::span<float> first_moment() { return first_.span(); }
  std::span<float> second_moment() { return second_.span(); }
  std::span<const float> first_moment() const { return first_.span(); }
  std::span<const float> second_moment() const { return second_.span(); }

 private:
  struct Piece {
    Range range;
    bool decay;
  };

  AdamWOptions options_;
  std::size_t size_;
  Range range_;
  std::vector<Piece> pieces_;  // of `range_`, in order, each of one kind and small
  FloatBuffer first_;
  FloatBuffer second_;
};

// The sums of squares of the blocks of `values`, the last of which may be short. `values` begins at
// a block boundary of the flat buffer; `sums` has norm_blocks(values.size()) elements.
void block_squares(std::span<const float> values, ThreadPool& pool, std::span<double> sums);

// The tree over those sums (lockstep/base/canonical_tree.h); `sums` is scratch of
// norm_blocks(values.size()) elements.
double sum_of_squares(std::span<const float> values, ThreadPool& pool, std::span<double> sums);

}  // namespace lockstep

#pragma once

#include <cstddef>
#include <span>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/comm/types.h"

namespace lockstep {

// The arithmetic of reductions. An element's result depends on its operands alone: not on its place
// in the range, the length, the alignment (any will do) or the instruction set the processor
// offers.
//
// f16 and bf16: computed in f32, rounded to nearest even at every node. A NaN that is computed is
// the canonical one, whatever NaNs went in: 0x7fc00000 in f32, 0x7ff8000000000000 in f64, 0x7e00 in
// f16, 0x7fc0 in bf16. Integers wrap. min and max: any NaN gives NaN, -0 < +0. kMean combines as
// kSum; `finish_mean` ends it.

// dst[i] = lhs[i] op rhs[i]. `dst` may be `lhs` or `rhs`; ranges must not overlap otherwise.
void combine(ReduceOp op, DataType type, void* dst, const void* lhs, const void* rhs,
             std::size_t count);

// data[i] = data[i] / n, n > 0: floating point multiplies by the rounded reciprocal of n, integers
// floor.
void finish_mean(DataType type, void* data, std::size_t count, int n);

// Index of the first NaN or infinity, or `count`. Integers are always finite.
std::size_t find_non_finite(DataType type, const void* data, std::size_t count);

// Combines `inputs` (one per node of `program`, in order) along the tree and writes the result to
// every one of `outputs`, in one pass over memory. An output may be one of the inputs; other
// overlaps are not allowed. When op is kMean, the result is finished with `mean_of`. No heap.
struct TreeReduction {
  ReduceOp op;
  DataType type;
  std::span<const CombineStep> program;
  int mean_of = 1;
};
void reduce_tree(const TreeReduction& reduction, std::span<const void* const> inputs,
                 std::span<void* const> outputs, std::size_t count);

}  // namespace lockstep

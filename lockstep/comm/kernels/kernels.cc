#include "lockstep/comm/kernels/kernels.h"

#include "lockstep/base/check.h"
#include "lockstep/base/processor.h"
#include "lockstep/comm/kernels/table.h"

namespace lockstep {
namespace {

const KernelTable& best_kernels() {
  static const KernelTable& best = *supported_kernels().front();
  return best;
}

}  // namespace

std::vector<const KernelTable*> supported_kernels() {
  std::vector<const KernelTable*> kernels;
#ifdef __x86_64__
  if (runs_x86_64_v4()) kernels.push_back(&kKernelsV4);
  if (runs_x86_64_v3()) kernels.push_back(&kKernelsV3);
#endif
  kernels.push_back(&kKernelsGeneric);
  return kernels;
}

void combine(ReduceOp op, DataType type, void* dst, const void* lhs, const void* rhs,
             std::size_t count) {
  best_kernels().combine(op, type, dst, lhs, rhs, count);
}

void finish_mean(DataType type, void* data, std::size_t count, int n) {
  best_kernels().finish_mean(type, data, count, n);
}

std::size_t find_non_finite(DataType type, const void* data, std::size_t count) {
  return best_kernels().find_non_finite(type, data, count);
}

void reduce_tree(const TreeReduction& reduction, std::span<const void* const> inputs,
                 std::span<void* const> outputs, std::size_t count) {
  reduce_tree(best_kernels(), reduction, inputs, outputs, count);
}

void reduce_tree(const KernelTable& kernels, const TreeReduction& reduction,
                 std::span<const void* const> inputs, std::span<void* const> outputs,
                 std::size_t count) {
  const std::size_t depth = stack_depth(reduction.program);
  LOCKSTEP_CHECK(depth > 0 && depth <= kMaxTreeDepth);
  LOCKSTEP_CHECK(reduction.program.size() == 2 * inputs.size() - 1);
  kernels.reduce_tree({.op = reduction.op,
                       .type = reduction.type,
                       .mean_of = reduction.mean_of,
                       .program = reduction.program.data(),
                       .steps = reduction.program.size(),
                       .inputs = inputs.data(),
                       .outputs = outputs.data(),
                       .output_count = outputs.size(),
                       .count = count});
}

}  // namespace lockstep

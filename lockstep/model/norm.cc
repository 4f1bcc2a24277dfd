#include "lockstep/model/norm.h"

#include <algorithm>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/base/check.h"
#include "lockstep/model/cpu/kernels.h"

namespace lockstep {

void block_squares(std::span<const float> values, ThreadPool& pool, std::span<double> sums) {
  LOCKSTEP_CHECK(sums.size() == norm_blocks(values.size()));
  const ModelKernels& kernels = best_model_kernels();
  constexpr std::size_t kBlocksPerTask = 16;
  pool.run((sums.size() + kBlocksPerTask - 1) / kBlocksPerTask, [&](std::size_t task) {
    const std::size_t end = std::min(sums.size(), (task + 1) * kBlocksPerTask);
    for (std::size_t block = task * kBlocksPerTask; block < end; ++block) {
      const std::size_t begin = block * kNormBlock;
      sums[block] =
          kernels.squares(values.data() + begin, std::min(kNormBlock, values.size() - begin));
    }
  });
}

double sum_of_squares(std::span<const float> values, ThreadPool& pool, std::span<double> sums) {
  block_squares(values, pool, sums);
  return tree_sum(sums);
}

float gradient_factor(double norm, std::int64_t tokens, double clip) {
  const auto count = static_cast<double>(tokens);
  const double scale = clip > 0.0 ? std::min(1.0, clip / (norm / count)) : 1.0;
  return static_cast<float>(scale / count);
}

}  // namespace lockstep

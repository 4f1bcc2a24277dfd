#include "lockstep/model/cpu/adamw.h"

#include <algorithm>
#include <cmath>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/base/check.h"
#include "lockstep/model/cpu/kernels.h"

namespace lockstep {
namespace {

constexpr std::size_t kPiece = 16384;  // elements; what one task updates

float rounded(double value) { return static_cast<float>(value); }

}  // namespace

AdamW::AdamW(const ParameterLayout& layout, const AdamWOptions& options)
    : AdamW(layout, options, {0, layout.size()}) {}

AdamW::AdamW(const ParameterLayout& layout, const AdamWOptions& options, Range range)
    : options_(options),
      size_(layout.size()),
      range_(range),
      first_(range.size()),
      second_(range.size()) {
  LOCKSTEP_CHECK(range.begin <= range.end && range.end <= layout.size());
  for (const TensorSpec& tensor : layout.tensors()) {
    const std::size_t end = std::min(range.end, tensor.range.end);
    for (std::size_t at = std::max(range.begin, tensor.range.begin); at < end; at += kPiece) {
      pieces_.push_back({{at, std::min(end, at + kPiece)}, tensor.decay});
    }
  }
  std::sort(pieces_.begin(), pieces_.end(),
            [](const Piece& a, const Piece& b) { return a.range.begin < b.range.begin; });
}

void AdamW::step(std::span<float> parameters, std::span<const float> gradient_sum, float factor,
                 double learning_rate, std::int64_t step, ThreadPool& pool) {
  LOCKSTEP_CHECK(parameters.size() == size_ && gradient_sum.size() == range_.size() && step >= 0);
  const auto t = static_cast<double>(step + 1);
  AdamWScalars scalars = {
      .factor = factor,
      .beta1 = rounded(options_.beta1),
      .rest1 = rounded(1.0 - options_.beta1),
      .beta2 = rounded(options_.beta2),
      .rest2 = rounded(1.0 - options_.beta2),
      .rate = rounded(learning_rate / (1.0 - std::pow(options_.beta1, t))),
      .root_scale = rounded(1.0 / std::sqrt(1.0 - std::pow(options_.beta2, t))),
      .eps = rounded(options_.eps),
      .keep = 1.0f,
  };
  AdamWScalars decaying = scalars;
  decaying.keep = rounded(1.0 - learning_rate * options_.weight_decay);
  const ModelKernels& kernels = best_model_kernels();
  pool.run(pieces_.size(), [&](std::size_t index) {
    const auto& [range, decay] = pieces_[index];
    const std::size_t own = range.begin - range_.begin;
    kernels.adamw(decay ? decaying : scalars, range.size(), gradient_sum.data() + own,
                  parameters.data() + range.begin, first_.data() + own, second_.data() + own);
  });
}

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

}  // namespace lockstep

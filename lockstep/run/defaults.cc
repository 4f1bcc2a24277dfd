#include "lockstep/run/defaults.h"

#include <algorithm>

namespace lockstep {
namespace {

struct Size {
  std::uint64_t most_tokens;
  int hidden, layers, heads, kv_heads, intermediate, context;
};
constexpr Size kSizes[] = {
    {200'000, 64, 3, 4, 2, 192, 128},          {20'000'000, 128, 4, 4, 2, 384, 256},
    {100'000'000, 256, 6, 8, 4, 768, 256},     {1'000'000'000, 512, 8, 8, 8, 1408, 512},
    {UINT64_MAX, 768, 12, 12, 12, 2048, 1024},
};
constexpr std::uint64_t kFewestSamples = 32;
constexpr int kShortestContext = 16;
constexpr std::uint64_t kFittingLanes = 8;

}  // namespace

ModelConfig fitting_model(std::uint64_t tokens) {
  const Size& size =
      *std::ranges::find_if(kSizes, [&](const Size& s) { return tokens <= s.most_tokens; });
  ModelConfig model;
  model.hidden = size.hidden;
  model.layers = size.layers;
  model.heads = size.heads;
  model.kv_heads = size.kv_heads;
  model.intermediate = size.intermediate;
  model.context = size.context;
  while (model.context > kShortestContext &&
         tokens / static_cast<std::uint64_t>(model.context) < kFewestSamples) {
    model.context /= 2;
  }
  return model;
}

std::int64_t fitting_steps(std::uint64_t parameters, std::uint64_t tokens_per_step,
                           std::uint64_t tokens) {
  const std::uint64_t per_step = std::max<std::uint64_t>(tokens_per_step, 1);
  const std::uint64_t wanted = std::max<std::uint64_t>(200, 10 * parameters / per_step);
  const std::uint64_t most = std::max<std::uint64_t>(
      1, tokens / per_step * kMostPasses + tokens % per_step * kMostPasses / per_step);
  return static_cast<std::int64_t>(std::min(wanted, most));
}

std::uint64_t fitting_micro_batch(std::uint64_t global_batch) {
  std::uint64_t lanes = std::min(kFittingLanes, global_batch);
  while (global_batch % lanes != 0) ++lanes;
  return global_batch / lanes;
}

double fitting_learning_rate(int hidden, bool trained) {
  return (trained ? 0.0256 : 0.256) / hidden;
}

std::uint64_t validation_samples(std::uint64_t samples) {
  return std::min(std::max<std::uint64_t>(samples / 20, 1), samples / 2);
}

}  // namespace lockstep

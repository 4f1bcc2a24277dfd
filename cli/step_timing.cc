#include "cli/step_timing.h"

#include <fmt/format.h>

#include <cerrno>
#include <fstream>

#include "lockstep/base/error.h"

namespace lockstep::cli {

StepBench::StepBench(const ModelConfig& config, int batch)
    : rows_(batch), context_(config.context) {
  const auto count = static_cast<std::uint32_t>(batch * config.context);
  for (std::uint32_t i = 0; i < count; ++i) {
    tokens_.push_back(bench_token(i, config.vocab));
    targets_.push_back(bench_token(i + 1, config.vocab));
  }
}

Batch StepBench::batch() const {
  return {.tokens = tokens_, .targets = targets_, .rows = rows_, .context = context_};
}

double StepBench::step(const std::function<std::int32_t(std::size_t)>& token) {
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    tokens_[i] = token(i);
    targets_[i] = token(i + 1);
  }
  return step();
}

void StepBench::write_weights(const std::string& path) const {
  const std::vector<float> values = parameters();
  std::ofstream file(path, std::ios::binary);
  for (const TensorSpec& tensor : layout().tensors()) {
    file.write(reinterpret_cast<const char*>(values.data() + tensor.range.begin),
               static_cast<std::streamsize>(tensor.range.size() * sizeof(float)));
  }
  if (!file.flush()) throw_io(fmt::format("writing {}", path), errno);
}

double StepBench::flops() const {
  const ModelConfig& config = layout().config();
  const auto parameter_count = static_cast<double>(layout().size());
  const double embedding = static_cast<double>(config.vocab) * config.hidden;
  const double attention =
      6.0 * config.layers * config.hidden * static_cast<double>(config.context);
  const double multiplied = config.tie_embeddings ? parameter_count : parameter_count - embedding;
  return tokens() * (6 * multiplied + attention);
}

std::int32_t bench_token(std::uint32_t index, int vocab) {
  return static_cast<std::int32_t>((index * 2654435761U >> 8) % static_cast<std::uint32_t>(vocab));
}

}  // namespace lockstep::cli

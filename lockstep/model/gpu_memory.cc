#include "lockstep/model/gpu_memory.h"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep {
namespace {

constexpr std::size_t kLibraries = std::size_t{900} << 20;  // what CUDA's libraries take

std::size_t size(int value) { return static_cast<std::size_t>(value); }

double gib(std::size_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

// The most rows that fit; 0 when not even one does.
int most_rows(GpuModelOptions options, std::size_t free) {
  int low = 0;
  int high = options.rows;
  while (low < high) {
    options.rows = (low + high + 1) / 2;
    if (gpu_bytes_needed(options) <= free) {
      low = options.rows;
    } else {
      high = options.rows - 1;
    }
  }
  return low;
}

}  // namespace

std::size_t attention_rows(std::size_t rows, std::size_t heads, std::size_t context,
                           std::size_t scratch) {
  const std::size_t row_bytes = heads * context * context * 2;
  std::size_t most = rows;
  while (most > 1 && (rows % most != 0 || most * row_bytes > scratch)) --most;
  return most;
}

std::size_t gpu_bytes_needed(const GpuModelOptions& options) {
  const ModelConfig& model = options.model;
  const std::size_t element = options.precision == Precision::kBf16 ? 2 : 4;
  const std::size_t parameters = ParameterLayout(model).size();
  const std::size_t state = parameters * 4 * (1 + options.accumulators) + options.shard.size() * 8 +
                            (element == 2 ? parameters * 2 : 0);
  const std::size_t tokens = size(options.rows) * size(options.context);
  const std::size_t qkv = size(model.hidden) + 2 * size(model.kv_hidden());
  const std::size_t block =
      (4 * size(model.hidden) + qkv + 3 * size(model.intermediate)) * element +
      (size(model.heads) + 2) * 4;
  const std::size_t blocks = options.recompute ? 1 : size(model.layers);
  const std::size_t rest = (4 * size(model.hidden) + qkv + size(model.intermediate)) * element +
                           (size(model.heads) + 2) * 4;
  const std::size_t activations =
      tokens * (blocks * block + size(model.layers) * size(model.hidden) * element + rest);
  const std::size_t logits = std::min(kGpuScratch, tokens * size(model.vocab) * element);
  const std::size_t attention =
      element == 2
          ? attention_rows(size(options.rows), size(model.heads), size(options.context)) *
                size(options.context) *
                (size(model.heads) * size(options.context) * 2 + 2 * size(model.hidden) * 2)
          : 0;
  return state + activations + std::max(logits, attention) + kLibraries;
}

std::optional<std::string> gpu_memory_refusal(const GpuModelOptions& options, std::size_t free) {
  const std::size_t needed = gpu_bytes_needed(options);
  if (needed <= free) return std::nullopt;
  std::string line = fmt::format(
      "out of GPU memory: {:.1f} GiB for {} x {} tokens at a time, where {:.1f} GiB are free",
      gib(needed), options.rows, options.context, gib(free));
  GpuModelOptions thrifty = options;
  thrifty.recompute = true;
  const int kept = most_rows(options, free);
  const int recomputed = most_rows(thrifty, free);
  if (kept > 0) line += fmt::format("; --micro-batch {} would fit", kept);
  if (recomputed > kept) {
    line += fmt::format("{} --recompute with --micro-batch {} would fit", kept > 0 ? ", and" : ";",
                        recomputed);
  }
  if (recomputed == 0) line += "; no --micro-batch would fit, only a smaller model or --context";
  return line;
}

}  // namespace lockstep

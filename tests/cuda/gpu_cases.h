#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <span>
#include <vector>

#include "lockstep/base/random.h"
#include "lockstep/model/gpu_model.h"
#include "lockstep/model/init.h"

// Tests of the GPU say so where there is none.
#define LOCKSTEP_NEEDS_GPU() \
  if (const auto reason = ::lockstep::gpu_refusal()) GTEST_SKIP() << "no GPU: " << *reason

namespace lockstep {

inline ModelConfig small_model(bool tied = false) {
  return {.vocab = 301,
          .hidden = 64,
          .layers = 2,
          .heads = 4,
          .kv_heads = 2,
          .intermediate = 104,
          .context = 90,
          .tie_embeddings = tied};
}

struct TestBatch {
  TestBatch(const ModelConfig& config, int rows_, std::uint64_t seed)
      : rows(rows_), context(config.context) {
    const auto vocab = static_cast<std::uint64_t>(config.vocab);
    for (int i = 0; i < rows * context; ++i) {
      const auto index = static_cast<std::uint64_t>(i);
      tokens.push_back(static_cast<std::int32_t>(random_u64(seed, 1, index) % vocab));
      targets.push_back(
          i % 11 == 3 ? -1 : static_cast<std::int32_t>(random_u64(seed, 2, index) % vocab));
    }
  }
  Batch batch() const { return {tokens, targets, rows, context}; }

  int rows, context;
  std::vector<std::int32_t> tokens, targets;
};

// Larger than at the start of a run, so that every part has its say.
inline std::vector<float> test_parameters(const ModelConfig& config, float scale = 6.0F) {
  const ParameterLayout layout(config);
  ThreadPool pool(1);
  std::vector<float> parameters(layout.size());
  initialise(layout, 3, pool, parameters);
  for (const TensorSpec& tensor : layout.tensors()) {
    for (std::size_t i = tensor.range.begin; i < tensor.range.end; ++i) {
      parameters[i] = tensor.cols == 1 ? 1.0F + 0.1F * static_cast<float>(random_u64(5, 0, i) % 7)
                                       : parameters[i] * scale;
    }
  }
  return parameters;
}

inline GpuModelOptions gpu_options(const ModelConfig& config, Precision precision, int rows,
                                   std::uint32_t accumulators = 1) {
  return {.model = config,
          .precision = precision,
          .adamw = {},
          .rows = rows,
          .context = config.context,
          .accumulators = accumulators,
          .shard = {0, ParameterLayout(config).size()}};
}

struct Gradient {
  LossSum sum;
  std::vector<float> values;
};

inline Gradient on_gpu(GpuModel& model, const Batch& batch) {
  Gradient result;
  model.gradient(batch, 0, {});
  result.sum = model.finish_lanes().front().sum;
  result.values.resize(model.layout().size());
  model.get_accumulator(0, result.values);
  return result;
}

// ‖a − b‖ / ‖b‖; not a number when either is not.
inline double distance(std::span<const float> a, std::span<const float> b) {
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    error += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    norm += static_cast<double>(b[i]) * b[i];
  }
  return std::sqrt(error / norm);
}

}  // namespace lockstep

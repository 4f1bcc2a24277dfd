#include "lockstep/model/gpu_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "gpu_cases.h"
#include "lockstep/base/canonical_tree.h"
#include "lockstep/base/error.h"
#include "lockstep/model/norm.h"
#include "lockstep/model/weights_hash.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;

struct Gradient {
  LossSum sum;
  std::vector<float> values;
};

Gradient on_cpu(const ModelConfig& config, const std::vector<float>& parameters,
                const Batch& batch) {
  ThreadPool pool(2);
  Transformer model(config, Precision::kF32, pool, batch.rows, batch.context);
  Gradient result;
  result.values.resize(parameters.size());
  result.sum = model.gradient(parameters, batch, result.values);
  return result;
}

Gradient on_gpu(GpuModel& model, const Batch& batch) {
  Gradient result;
  result.sum = model.gradient(batch, 0, {}, {}, {}).sum;
  result.values.resize(model.layout().size());
  model.get_slot(0, result.values);
  return result;
}

void expect_close(const ParameterLayout& layout, const Gradient& ours, const Gradient& reference,
                  double limit) {
  EXPECT_EQ(ours.sum.tokens, reference.sum.tokens);
  EXPECT_NEAR(ours.sum.loss, reference.sum.loss, limit * reference.sum.loss);
  for (const TensorSpec& tensor : layout.tensors()) {
    const auto part = [&](const Gradient& gradient) {
      return std::span(gradient.values).subspan(tensor.range.begin, tensor.range.size());
    };
    EXPECT_LT(distance(part(ours), part(reference)), limit) << tensor.name;
  }
}

class GpuParity : public ::testing::TestWithParam<ModelConfig> {};

TEST_P(GpuParity, Fp32IsTheCpus) {
  LOCKSTEP_NEEDS_GPU();
  const ModelConfig config = GetParam();
  const std::vector<float> parameters = test_parameters(config);
  const TestBatch data(config, 3, 7);
  const auto model = make_gpu_model(gpu_options(config, Precision::kF32, 3));
  model->set_parameters(parameters);
  expect_close(model->layout(), on_gpu(*model, data.batch()),
               on_cpu(config, parameters, data.batch()), 1e-4);
}

TEST_P(GpuParity, Bf16IsNear) {
  LOCKSTEP_NEEDS_GPU();
  const ModelConfig config = GetParam();
  const std::vector<float> parameters = test_parameters(config, 3.0F);
  const TestBatch data(config, 3, 7);
  const auto model = make_gpu_model(gpu_options(config, Precision::kBf16, 3));
  model->set_parameters(parameters);
  expect_close(model->layout(), on_gpu(*model, data.batch()),
               on_cpu(config, parameters, data.batch()), 5e-2);
}

INSTANTIATE_TEST_SUITE_P(Shapes, GpuParity,
                         ::testing::Values(small_model(), small_model(true),
                                           ModelConfig{.vocab = 1000,
                                                       .hidden = 256,
                                                       .layers = 3,
                                                       .heads = 4,
                                                       .kv_heads = 4,
                                                       .intermediate = 512,
                                                       .context = 256},
                                           ModelConfig{.vocab = 50,
                                                       .hidden = 1040,
                                                       .layers = 1,
                                                       .heads = 13,
                                                       .kv_heads = 1,
                                                       .intermediate = 8,
                                                       .context = 33}));

TEST(GpuModel, SameBitsEveryTimeAndAsAGraph) {
  LOCKSTEP_NEEDS_GPU();
  for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
    const ModelConfig config = small_model();
    const TestBatch data(config, 4, 1);
    const TestBatch other(config, 4, 2);
    const auto model = make_gpu_model(gpu_options(config, precision, 4));
    model->set_parameters(test_parameters(config));
    const Gradient first = on_gpu(*model, data.batch());
    for (int repeat = 0; repeat < 4; ++repeat) {  // the later ones are graphs
      const Gradient again = on_gpu(*model, repeat % 2 == 0 ? other.batch() : data.batch());
      if (repeat % 2 == 0) continue;
      EXPECT_EQ(again.values, first.values);
      EXPECT_EQ(again.sum.loss, first.sum.loss);
    }
    EXPECT_EQ(model->loss(data.batch()).loss, first.sum.loss);
  }
}

TEST(GpuModel, RecomputedActivationsAreTheSame) {
  LOCKSTEP_NEEDS_GPU();
  const ModelConfig config = small_model();
  const TestBatch data(config, 2, 1);
  GpuModelOptions options = gpu_options(config, Precision::kBf16, 2);
  const auto keeping = make_gpu_model(options);
  options.recompute = true;
  const auto recomputing = make_gpu_model(options);
  keeping->set_parameters(test_parameters(config));
  recomputing->set_parameters(test_parameters(config));
  EXPECT_EQ(on_gpu(*recomputing, data.batch()).values, on_gpu(*keeping, data.batch()).values);
  EXPECT_LT(recomputing->bytes(), keeping->bytes());
}

TEST(GpuModel, MissingRowsDoNotCount) {
  LOCKSTEP_NEEDS_GPU();
  const ModelConfig config = small_model();
  const std::vector<float> parameters = test_parameters(config);
  const TestBatch data(config, 2, 3);
  const auto model = make_gpu_model(gpu_options(config, Precision::kF32, 5));
  model->set_parameters(parameters);
  expect_close(model->layout(), on_gpu(*model, data.batch()),
               on_cpu(config, parameters, data.batch()), 1e-4);
}

TEST(GpuModel, MergesSlotsAndStagesThem) {
  LOCKSTEP_NEEDS_GPU();
  const ModelConfig config = small_model();
  const TestBatch left(config, 2, 1);
  const TestBatch right(config, 2, 2);
  const auto model = make_gpu_model(gpu_options(config, Precision::kBf16, 2, 2));
  model->set_parameters(test_parameters(config));
  const std::vector<float> a = on_gpu(*model, left.batch()).values;
  std::vector<float> sum = on_gpu(*model, right.batch()).values;
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = a[i] + sum[i];

  std::vector<float> staged(sum.size());
  model->stage(0, staged);
  const std::vector<SlotMerge> merges = {{0, 1}};
  const std::vector<std::uint32_t> slots = {0};
  for (int repeat = 0; repeat < 4; ++repeat) {
    std::fill(staged.begin(), staged.end(), std::numeric_limits<float>::quiet_NaN());
    model->gradient(left.batch(), 0, {}, {}, {});
    std::size_t end = 0;
    model->gradient(right.batch(), 1, merges, slots, [&](Range range) {
      EXPECT_EQ(range.begin, end);
      end = range.end;
      for (std::size_t i = range.begin; i < range.end; ++i) ASSERT_EQ(staged[i], sum[i]) << i;
    });
    EXPECT_EQ(end, sum.size());
  }
  // What comes back from elsewhere is what the optimizer sees.
  std::fill(staged.begin(), staged.end(), 0.5F);
  model->upload(0, {0, staged.size()});
  std::vector<float> back(staged.size());
  model->get_slot(0, back);
  EXPECT_EQ(back, staged);
  model->skip(1, merges, slots, [&](Range range) { EXPECT_EQ(staged[range.begin], 0.5F); });
}

TEST(GpuModel, UpdatesAsTheCpuToTheBit) {
  LOCKSTEP_NEEDS_GPU();
  const ModelConfig config = small_model();
  const TestBatch data(config, 2, 1);
  const ParameterLayout layout(config);
  const Range shard{4096, layout.size()};
  GpuModelOptions options = gpu_options(config, Precision::kBf16, 2);
  options.shard = shard;
  const auto model = make_gpu_model(options);
  std::vector<float> parameters = test_parameters(config);
  model->set_parameters(parameters);
  ThreadPool pool(1);
  AdamW adamw(layout, {}, shard);
  std::vector<double> ours(norm_blocks(layout.size()));
  std::vector<double> theirs(ours.size());
  for (std::int64_t step = 0; step < 3; ++step) {
    const Gradient gradient = on_gpu(*model, data.batch());
    model->block_squares({0, layout.size()}, ours);
    block_squares(gradient.values, pool, theirs);
    for (std::size_t i = 0; i < ours.size(); ++i)
      EXPECT_NEAR(ours[i], theirs[i], 1e-12 * theirs[i]);
    const float factor = gradient_factor(std::sqrt(tree_sum(ours)), gradient.sum.tokens, 1.0);
    model->update(factor, 1e-3, step);
    adamw.step(parameters, gradient.values, factor, 1e-3, step, pool);
  }
  std::vector<float> updated(parameters.size());
  model->get_parameters(updated, {0, updated.size()});
  EXPECT_EQ(updated, parameters);
  std::vector<float> first(shard.size());
  std::vector<float> second(shard.size());
  model->get_moments(first, second);
  EXPECT_TRUE(std::ranges::equal(first, adamw.first_moment()));
  EXPECT_TRUE(std::ranges::equal(second, adamw.second_moment()));
  model->set_moments(second, first);
  model->get_moments(first, second);
  EXPECT_TRUE(std::ranges::equal(second, adamw.first_moment()));
}

TEST(GpuModel, HashesAreBlake3) {
  LOCKSTEP_NEEDS_GPU();
  const ModelConfig config = small_model();
  const auto model = make_gpu_model(gpu_options(config, Precision::kBf16, 1));
  const std::vector<float> parameters = test_parameters(config);
  model->set_parameters(parameters);
  const std::vector<Blake3Hash> hashes = model->tensor_hashes();
  ASSERT_EQ(hashes.size(), model->layout().tensors().size());
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    const TensorSpec& tensor = model->layout().tensors()[i];
    EXPECT_EQ(hashes[i],
              blake3(std::as_bytes(
                  std::span(parameters).subspan(tensor.range.begin, tensor.range.size()))))
        << tensor.name;
  }
}

TEST(GpuModel, WhatIsNotFiniteShows) {
  LOCKSTEP_NEEDS_GPU();
  const ModelConfig config = small_model();
  const TestBatch data(config, 2, 1);
  for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
    const auto model = make_gpu_model(gpu_options(config, precision, 2));
    std::vector<float> parameters = test_parameters(config);
    parameters[model->layout().range(Component::kDown, 1).begin] =
        std::numeric_limits<float>::quiet_NaN();
    model->set_parameters(parameters);
    EXPECT_FALSE(std::isfinite(model->gradient(data.batch(), 0, {}, {}, {}).sum.loss));
    std::vector<double> sums(norm_blocks(parameters.size()));
    model->block_squares({0, parameters.size()}, sums);
    EXPECT_FALSE(std::isfinite(tree_sum(sums)));
  }
}

TEST(GpuModel, FollowsFiniteDifferences) {
  LOCKSTEP_NEEDS_GPU();
  const ModelConfig config = small_model();
  const TestBatch data(config, 2, 9);
  const auto model = make_gpu_model(gpu_options(config, Precision::kF32, 2));
  std::vector<float> parameters = test_parameters(config, 2.0F);
  model->set_parameters(parameters);
  const std::vector<float> gradient = on_gpu(*model, data.batch()).values;
  for (const TensorSpec& tensor : model->layout().tensors()) {
    // Along the gradient of the tensor, where the slope is its norm.
    double norm = 0;
    for (std::size_t i = tensor.range.begin; i < tensor.range.end; ++i) {
      norm += static_cast<double>(gradient[i]) * gradient[i];
    }
    norm = std::sqrt(norm);
    constexpr double kStep = 1e-2;
    const auto at = [&](double distance_along) {
      std::vector<float> moved = parameters;
      for (std::size_t i = tensor.range.begin; i < tensor.range.end; ++i) {
        moved[i] += static_cast<float>(distance_along * gradient[i] / norm);
      }
      model->set_parameters(moved);
      return model->loss(data.batch()).loss;
    };
    EXPECT_NEAR((at(kStep) - at(-kStep)) / (2 * kStep), norm, 1e-2 * norm) << tensor.name;
  }
}

TEST(GpuModel, RefusesWhatDoesNotFit) {
  LOCKSTEP_NEEDS_GPU();
  ModelConfig config = small_model();
  config.intermediate = 70;
  const auto message = [](const GpuModelOptions& options) -> std::string {
    try {
      make_gpu_model(options);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  };
  EXPECT_THAT(message(gpu_options(config, Precision::kBf16, 1)), HasSubstr("--intermediate"));
  GpuModelOptions huge = gpu_options(small_model(), Precision::kBf16, 1 << 22);
  EXPECT_THAT(message(huge), HasSubstr("out of GPU memory"));
  EXPECT_THAT(message(huge), HasSubstr("would fit"));
}

}  // namespace
}  // namespace lockstep

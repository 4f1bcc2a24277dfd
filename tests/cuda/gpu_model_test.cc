#include "lockstep/model/gpu_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "gpu_cases.h"
#include "lockstep/base/error.h"
#include "lockstep/model/cpu/decoder.h"
#include "lockstep/model/cpu/transformer.h"
#include "lockstep/model/cuda/kernels.h"
#include "lockstep/model/gpu_decoder.h"
#include "lockstep/model/weights_hash.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;

Gradient on_cpu(const ModelConfig& config, const std::vector<float>& parameters,
                const Batch& batch) {
  ThreadPool pool(2);
  Transformer model(config, Precision::kF32, pool, batch.rows, batch.context);
  Gradient result;
  result.values.resize(parameters.size());
  result.sum = model.gradient(parameters, batch, result.values);
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

// What GPUs get for which cuDNN has no deterministic attention.
TEST_P(GpuParity, Bf16IsNearWithPlainAttention) {
  LOCKSTEP_NEEDS_GPU();
  const ModelConfig config = GetParam();
  const std::vector<float> parameters = test_parameters(config, 3.0F);
  const TestBatch data(config, 3, 7);
  GpuModelOptions options = gpu_options(config, Precision::kBf16, 3);
  options.plain_attention = true;
  const auto model = make_gpu_model(options);
  model->set_parameters(parameters);
  const Gradient first = on_gpu(*model, data.batch());
  expect_close(model->layout(), first, on_cpu(config, parameters, data.batch()), 5e-2);
  EXPECT_EQ(on_gpu(*model, data.batch()).values, first.values);
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

TEST(GpuModel, LogitsOfASequenceAreTheCpus) {
  LOCKSTEP_NEEDS_GPU();
  for (const auto& [precision, limit] :
       {std::pair(Precision::kF32, 1e-4), {Precision::kBf16, 5e-2}}) {
    const ModelConfig config = small_model();
    const std::vector<float> parameters = test_parameters(config, 3.0F);
    const TestBatch data(config, 1, 5);
    ThreadPool pool(2);
    const ParameterLayout layout(config);
    Decoder decoder(layout, parameters, Precision::kF32, pool);
    GpuModelOptions options = gpu_decoder_options(config, config.context);
    options.precision = precision;
    auto model = make_gpu_model(options);
    model->set_parameters(parameters);
    GpuDecoder on_card(std::move(model), config.context);
    const std::span tokens(data.tokens);
    std::size_t read = 0;
    for (const std::size_t count : {5, 1, 1, 40, 43}) {  // up to the whole context
      const auto piece = tokens.subspan(read, count);
      EXPECT_LT(distance(on_card.logits_after(piece), decoder.logits_after(piece)), limit) << read;
      read += count;
    }
    EXPECT_EQ(on_card.length(), tokens.size());
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

TEST(GpuModel, MergesAccumulatorsAndStagesThem) {
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
  const std::vector<AccumulatorMerge> merges = {{0, 1}};
  std::size_t end = 0;
  GpuDelivery delivery{.accumulators = {0}, .copied = {}, .reduce = {}};
  delivery.copied = [&](Range range) {
    EXPECT_EQ(range.begin, end);
    end = range.end;
    for (std::size_t i = range.begin; i < range.end; ++i) ASSERT_EQ(staged[i], sum[i]) << i;
  };
  for (int repeat = 0; repeat < 4; ++repeat) {
    std::fill(staged.begin(), staged.end(), std::numeric_limits<float>::quiet_NaN());
    end = 0;
    model->gradient(left.batch(), 0, {});
    model->gradient(right.batch(), 1, merges, &delivery);
    EXPECT_EQ(end, sum.size());
    EXPECT_EQ(model->finish_lanes().size(), 2U);
  }
  // What comes back from elsewhere is what the optimizer sees.
  std::fill(staged.begin(), staged.end(), 0.5F);
  model->upload(0, {0, 1000});
  model->upload(0, {1000, staged.size()});
  std::vector<float> back(staged.size());
  model->get_accumulator(0, back);
  EXPECT_EQ(back, staged);
  delivery.copied = [&](Range range) { EXPECT_EQ(staged[range.begin], 0.5F); };
  model->skip(1, merges, &delivery);
  EXPECT_EQ(model->finish_lanes().front().sum.tokens, 0);
}

// Graphs that were made before have addresses in them: nothing of them is used afterwards.
TEST(GpuModel, TakesOtherAccumulatorsAndMoments) {
  LOCKSTEP_NEEDS_GPU();
  const ModelConfig config = small_model();
  const TestBatch left(config, 2, 1);
  const TestBatch right(config, 2, 2);
  const std::size_t size = ParameterLayout(config).size();
  const std::vector<AccumulatorMerge> merges = {{0, 1}};
  // Four steps, so that there are graphs; returns the sum of the last one.
  const auto train = [&](GpuModel& model, std::int64_t first_step) {
    std::vector<float> staged(size);
    model.stage(0, staged);
    GpuDelivery delivery{.accumulators = {0}, .copied = [](Range) {}, .reduce = {}};
    for (std::int64_t step = first_step; step < first_step + 4; ++step) {
      model.gradient(left.batch(), 0, {});
      model.gradient(right.batch(), 1, merges, &delivery);
      model.finish_lanes();
      model.update({.tokens = 100, .clip = 1, .learning_rate = 1e-2, .step = step});
      EXPECT_TRUE(model.finish_update().done);
    }
    model.unstage();
    return staged;
  };
  const auto state = [&](const GpuModel& model, Range shard) {
    std::vector<std::vector<float>> values = {std::vector<float>(size),
                                              std::vector<float>(shard.size()),
                                              std::vector<float>(shard.size())};
    model.get_parameters(values[0]);
    model.get_moments(values[1], values[2]);
    return values;
  };
  const auto model = make_gpu_model(gpu_options(config, Precision::kBf16, 2, 2));
  model->set_parameters(test_parameters(config));
  train(*model, 0);
  const auto before = state(*model, {0, size});
  const std::size_t bytes = model->bytes();

  model->resize(5, {0, size});
  EXPECT_EQ(model->bytes(), bytes + 3 * size * sizeof(float));
  EXPECT_EQ(state(*model, {0, size}), before);
  model->resize(3, {4096, size});
  auto changed = state(*model, {4096, size});
  EXPECT_EQ(changed[0], before[0]);
  for (const float moment : changed[1]) ASSERT_EQ(moment, 0);
  for (const float moment : changed[2]) ASSERT_EQ(moment, 0);

  // As a model that was made like that.
  GpuModelOptions options = gpu_options(config, Precision::kBf16, 2, 3);
  options.shard = {4096, size};
  const auto made = make_gpu_model(options);
  made->set_parameters(before[0]);
  const std::span<const float> first = std::span(before[1]).subspan(4096);
  const std::span<const float> second = std::span(before[2]).subspan(4096);
  made->set_moments(first, second);
  model->set_moments(first, second);
  EXPECT_EQ(train(*model, 4), train(*made, 4));
  EXPECT_EQ(state(*model, {4096, size}), state(*made, {4096, size}));
  EXPECT_EQ(model->bytes(), made->bytes());

  model->resize(0, {0, 0});
  std::vector<float> parameters(size);
  model->get_parameters(parameters);
  EXPECT_EQ(parameters, state(*made, {4096, size})[0]);
}

// Memory of the host is free when it is given up, and what was uploaded is there.
TEST(GpuModel, GivesUpHostMemoryInTheMiddleOfAStep) {
  LOCKSTEP_NEEDS_GPU();
  const ModelConfig config = small_model();
  const TestBatch data(config, 2, 1);
  const auto model = make_gpu_model(gpu_options(config, Precision::kF32, 2, 2));
  model->set_parameters(test_parameters(config));
  const Gradient expected = on_gpu(*model, data.batch());
  const std::size_t size = expected.values.size();
  for (int turn = 0; turn < 3; ++turn) {
    auto host = std::make_unique<std::vector<float>>(size, 0.5F + static_cast<float>(turn));
    model->stage(0, *host);
    model->gradient(data.batch(), 1, {});  // nobody asks for its result
    model->upload(0, {0, size});
    model->unstage();
    host.reset();
    std::vector<float> uploaded(size);
    model->get_accumulator(0, uploaded);
    for (const float value : uploaded) ASSERT_EQ(value, 0.5F + static_cast<float>(turn));
    EXPECT_TRUE(model->finish_lanes().empty());
    EXPECT_EQ(on_gpu(*model, data.batch()).values, expected.values);
  }
}

// Several lanes are enqueued before one is waited for, and what reduces on the device comes between
// the gradient and the update.
TEST(GpuModel, LanesAreEnqueuedAndReducedOnTheDevice) {
  LOCKSTEP_NEEDS_GPU();
  const ModelConfig config = small_model();
  const auto model = make_gpu_model(gpu_options(config, Precision::kBf16, 2, 2));
  std::vector<TestBatch> batches;
  std::vector<LossSum> alone;
  model->set_parameters(test_parameters(config));
  for (std::uint64_t i = 0; i < 5; ++i) {
    batches.emplace_back(config, 2, i);
    alone.push_back(on_gpu(*model, batches.back().batch()).sum);
  }
  std::vector<float> last(model->layout().size());
  model->get_accumulator(0, last);
  std::vector<float> doubled = last;
  for (float& value : doubled) value += value;

  GpuDelivery delivery{.accumulators = {0}, .copied = {}, .reduce = {}};
  std::size_t end = 0;
  delivery.reduce = [&](std::span<float* const> accumulators, Range range, DeviceStream stream) {
    ASSERT_EQ(accumulators.size(), 1U);
    EXPECT_EQ(range.begin, end);
    end = range.end;
    cuda::add(range.size(), accumulators[0] + range.begin, accumulators[0] + range.begin, stream);
  };
  for (int repeat = 0; repeat < 4; ++repeat) {
    end = 0;
    for (std::size_t i = 0; i < batches.size(); ++i) {
      model->gradient(batches[i].batch(), 0, {}, i + 1 == batches.size() ? &delivery : nullptr);
    }
    const std::vector<LaneResult> lanes = model->finish_lanes();
    ASSERT_EQ(lanes.size(), batches.size());
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      EXPECT_EQ(lanes[i].sum.loss, alone[i].loss) << i;
      EXPECT_EQ(lanes[i].sum.tokens, alone[i].tokens) << i;
      EXPECT_GT(lanes[i].forward_seconds, 0);
      EXPECT_GT(lanes[i].backward_seconds, 0);
      EXPECT_LT(lanes[i].backward_seconds, 10);
    }
    EXPECT_EQ(end, last.size());
    std::vector<float> sum(last.size());
    model->get_accumulator(0, sum);
    EXPECT_EQ(sum, doubled);
  }
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

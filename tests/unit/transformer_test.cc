#include "lockstep/model/cpu/transformer.h"

#include <gtest/gtest.h>

#include <cmath>

#include "lockstep/base/error.h"
#include "lockstep/base/random.h"
#include "lockstep/model/init.h"

namespace lockstep::transformer_test {
namespace {

constexpr ModelConfig kConfig = {.vocab = 300,
                                 .hidden = 48,
                                 .layers = 2,
                                 .heads = 6,
                                 .kv_heads = 2,
                                 .intermediate = 70,
                                 .context = 90};

struct Data {
  Data(int rows_, int context_, std::uint64_t seed) : rows(rows_), context(context_) {
    for (int i = 0; i < rows * context; ++i) {
      const auto index = static_cast<std::uint64_t>(i);
      tokens.push_back(static_cast<std::int32_t>(random_u64(seed, 1, index) % 300));
      targets.push_back(i % 11 == 3 ? -1
                                    : static_cast<std::int32_t>(random_u64(seed, 2, index) % 300));
    }
  }
  Batch batch() const { return {tokens, targets, rows, context}; }

  int rows, context;
  std::vector<std::int32_t> tokens, targets;
};

std::vector<float> parameters_of(const ModelConfig& config, float scale = 8.0f) {
  const ParameterLayout layout(config);
  ThreadPool pool(1);
  std::vector<float> parameters(layout.size());
  initialise(layout, 3, pool, parameters);
  // Larger than at the start of a run, so that every part has its say.
  for (const TensorSpec& tensor : layout.tensors()) {
    if (tensor.cols == 1) continue;
    for (std::size_t i = tensor.range.begin; i < tensor.range.end; ++i) parameters[i] *= scale;
  }
  return parameters;
}

struct Result {
  double loss = 0.0;
  std::int64_t tokens = 0;
  std::vector<float> gradient;
  bool operator==(const Result&) const = default;
};

Result gradient(Transformer& model, const std::vector<float>& parameters, const Batch& batch) {
  Result result;
  result.gradient.assign(model.layout().size(), std::nanf(""));  // it is overwritten
  const LossSum sum = model.gradient(parameters, batch, result.gradient);
  result.loss = sum.loss;
  result.tokens = sum.tokens;
  return result;
}

TEST(Transformer, SameBitsForAnyThreadsAndAgain) {
  for (const bool tied : {false, true}) {
    ModelConfig config = kConfig;
    config.tie_embeddings = tied;
    const std::vector<float> parameters = parameters_of(config);
    const Data data(3, 90, 1), other(2, 31, 2);
    ThreadPool one(1);
    Transformer model(config, Precision::kF32, one, 3, 90);
    const Result expected = gradient(model, parameters, data.batch());
    EXPECT_TRUE(std::isfinite(expected.loss));
    gradient(model, parameters, other.batch());  // what was computed before does not matter
    EXPECT_EQ(gradient(model, parameters, data.batch()), expected);
    for (const int threads : {2, 4}) {
      ThreadPool pool(threads);
      Transformer again(config, Precision::kF32, pool, 3, 90);
      EXPECT_EQ(gradient(again, parameters, data.batch()), expected) << threads << " threads";
    }
  }
}

TEST(Transformer, ARowDoesNotDependOnTheBatchBesideIt) {
  const std::vector<float> parameters = parameters_of(kConfig);
  const Data data(4, 50, 1);
  ThreadPool pool(2);
  Transformer model(kConfig, Precision::kF32, pool, 4, 90);
  std::vector<float> together(4 * 50 * 300), alone(50 * 300);
  model.logits(parameters, data.batch(), together);
  double losses = 0.0;
  for (std::size_t row = 0; row < 4; ++row) {
    const Batch one = {std::span(data.tokens).subspan(row * 50, 50),
                       std::span(data.targets).subspan(row * 50, 50), 1, 50};
    model.logits(parameters, one, alone);
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), together.begin() + row * 50 * 300)) << row;
    losses += model.loss(parameters, one).loss;
  }
  EXPECT_NEAR(model.loss(parameters, data.batch()).loss, losses, 1e-9 * losses);
}

TEST(Transformer, TellsEveryRangeOnceInOrderAndWhenItIsFinal) {
  for (const bool tied : {false, true}) {
    ModelConfig config = kConfig;
    config.tie_embeddings = tied;
    const std::vector<float> parameters = parameters_of(config);
    const Data data(2, 40, 1);
    ThreadPool pool(2);
    Transformer model(config, Precision::kF32, pool, 2, 40);
    std::vector<float> flat(model.layout().size(), -1.0f), seen;
    std::size_t ranges = 0;
    model.gradient(parameters, data.batch(), flat, [&](Range range) {
      EXPECT_EQ(range.begin, seen.size());
      seen.insert(seen.end(), flat.begin() + static_cast<std::ptrdiff_t>(range.begin),
                  flat.begin() + static_cast<std::ptrdiff_t>(range.end));
      ++ranges;
    });
    EXPECT_EQ(seen, flat);
    EXPECT_EQ(ranges, (tied ? 2u : 3u) + 2u * 6u);
  }
}

TEST(Transformer, IgnoredTargetsAddNothing) {
  const std::vector<float> parameters = parameters_of(kConfig);
  Data data(2, 20, 1);
  ThreadPool pool(1);
  Transformer model(kConfig, Precision::kF32, pool, 2, 20);
  // The second row is ignored, so it may as well not be there.
  std::fill(data.targets.begin() + 20, data.targets.end(), -100);
  const Result both = gradient(model, parameters, data.batch());
  const Result first =
      gradient(model, parameters,
               {std::span(data.tokens).first(20), std::span(data.targets).first(20), 1, 20});
  EXPECT_EQ(both.tokens, first.tokens);
  EXPECT_EQ(both.tokens, 18);
  EXPECT_EQ(both.loss, first.loss);
  for (std::size_t i = 0; i < first.gradient.size(); ++i) {
    ASSERT_NEAR(both.gradient[i], first.gradient[i], 1e-6f + 1e-5f * std::abs(first.gradient[i]));
  }
  std::fill(data.targets.begin(), data.targets.end(), -1);
  const Result none = gradient(model, parameters, data.batch());
  EXPECT_EQ(none.loss, 0.0);
  EXPECT_EQ(none.tokens, 0);
  for (const float g : none.gradient) ASSERT_EQ(g, 0.0f);
}

// With this vocabulary the lm_head takes 64 tokens at a time.
TEST(Transformer, ABatchIsTheSumOfItsRowsAcrossChunks) {
  ModelConfig config = kConfig;
  config.vocab = 65536;
  config.hidden = 16;
  config.heads = config.kv_heads = 2;
  for (const bool tied : {false, true}) {
    config.tie_embeddings = tied;
    const std::vector<float> parameters = parameters_of(config);
    const Data data(3, 50, 1);
    ThreadPool pool(2);
    Transformer model(config, Precision::kF32, pool, 3, 50);
    const Result together = gradient(model, parameters, data.batch());
    std::vector<double> sum(together.gradient.size());
    double loss = 0.0;
    for (std::size_t row = 0; row < 3; ++row) {
      const Result one = gradient(model, parameters,
                                  {std::span(data.tokens).subspan(row * 50, 50),
                                   std::span(data.targets).subspan(row * 50, 50), 1, 50});
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += one.gradient[i];
      loss += one.loss;
    }
    EXPECT_NEAR(together.loss, loss, 1e-9 * loss);
    for (std::size_t i = 0; i < sum.size(); ++i) {
      ASSERT_NEAR(together.gradient[i], sum[i], 1e-5 + 1e-5 * std::abs(sum[i])) << i;
    }
  }
}

TEST(Transformer, LossIsThatOfTheGradient) {
  const std::vector<float> parameters = parameters_of(kConfig);
  const Data data(2, 33, 1);
  ThreadPool pool(2);
  Transformer model(kConfig, Precision::kF32, pool, 2, 33);
  EXPECT_EQ(model.loss(parameters, data.batch()).loss,
            gradient(model, parameters, data.batch()).loss);
}

// Through all layers at once: the loss falls as steeply as the gradient says.
TEST(Transformer, TheGradientIsTheSlopeOfTheLoss) {
  const std::vector<float> parameters = parameters_of(kConfig, 4.0f);
  const Data data(2, 30, 1);
  ThreadPool pool(2);
  Transformer model(kConfig, Precision::kF32, pool, 2, 30);
  const Result result = gradient(model, parameters, data.batch());
  double squares = 0.0;
  for (const float g : result.gradient) squares += static_cast<double>(g) * g;
  const double step = 1e-3 / std::sqrt(squares);
  const auto moved = [&](double by) {
    std::vector<float> at = parameters;
    for (std::size_t i = 0; i < at.size(); ++i) {
      at[i] = static_cast<float>(at[i] + by * result.gradient[i]);
    }
    return model.loss(at, data.batch()).loss;
  };
  EXPECT_NEAR((moved(step) - moved(-step)) / (2 * step) / squares, 1.0, 5e-3);
}

TEST(Transformer, RecomputedActivationsAreTheSame) {
  ModelConfig config = kConfig;
  for (const int layers : {1, 2, 5}) {
    config.layers = layers;
    const std::vector<float> parameters = parameters_of(config);
    ThreadPool pool(2);
    Transformer keeping(config, Precision::kF32, pool, 3, 40);
    Transformer recomputing(config, Precision::kF32, pool, 3, 40, true);
    for (const std::uint64_t seed : {1, 2}) {
      const Data data(3, 40, seed);
      EXPECT_EQ(gradient(recomputing, parameters, data.batch()),
                gradient(keeping, parameters, data.batch()))
          << layers << " layers";
      EXPECT_EQ(recomputing.loss(parameters, data.batch()).loss,
                keeping.loss(parameters, data.batch()).loss);
    }
  }
}

std::string refusal(Transformer& model, const std::vector<float>& parameters, const Batch& batch) {
  try {
    model.loss(parameters, batch);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return std::string(error.message());
  }
  return "accepted";
}

TEST(Transformer, RefusesWhatDoesNotFit) {
  const std::vector<float> parameters = parameters_of(kConfig);
  ThreadPool pool(1);
  Transformer model(kConfig, Precision::kF32, pool, 2, 20);
  Data data(2, 20, 1);
  EXPECT_EQ(refusal(model, parameters, Data(3, 20, 1).batch()),
            "a batch of 3 x 20 tokens, where there is room for 2 x 20");
  EXPECT_EQ(refusal(model, parameters, {data.tokens, data.targets, 2, 10}),
            "a batch of 2 x 10 has 40 tokens and 40 targets");
  data.tokens[27] = 300;
  EXPECT_EQ(refusal(model, parameters, data.batch()),
            "token 300 in row 1, position 7 is not in the vocabulary of 300");
  data.tokens[27] = -1;
  EXPECT_EQ(refusal(model, parameters, data.batch()),
            "token -1 in row 1, position 7 is not in the vocabulary of 300");
  data.tokens[27] = 5;
  data.targets[3] = 301;
  EXPECT_EQ(refusal(model, parameters, data.batch()),
            "target 301 in row 0, position 3 is not in the vocabulary of 300");
  EXPECT_THROW(Transformer(kConfig, Precision::kF32, pool, 2, 91), Error);
  EXPECT_THROW(Transformer(kConfig, Precision::kF32, pool, 0, 20), Error);
}

}  // namespace
}  // namespace lockstep::transformer_test

#include "lockstep/train/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "lockstep/model/cpu/decoder.h"
#include "lockstep/model/cpu/transformer.h"
#include "lockstep/model/init.h"

namespace lockstep::sampler_test {
namespace {

const std::vector<float> kLogits = {0.0f, 2.0f, 1.0f, 2.0f, -50.0f};

std::map<std::int32_t, int> draws(const SamplerOptions& options, int count = 20'000) {
  std::map<std::int32_t, int> seen;
  for (int i = 0; i < count; ++i)
    ++seen[sample_token(kLogits, options, static_cast<std::uint64_t>(i))];
  return seen;
}

TEST(Sampler, ColdTakesTheLikeliestAndTheLowerOfEquals) {
  EXPECT_EQ(sample_token(kLogits, {.temperature = 0}, 0), 1);
}

TEST(Sampler, DrawsFromTheSoftmax) {
  const auto seen = draws({.temperature = 1});
  const double total = 1 + 2 * std::exp(2.0) + std::exp(1.0);
  EXPECT_NEAR(seen.at(0), 20'000 / total, 150);
  EXPECT_NEAR(seen.at(1), 20'000 * std::exp(2.0) / total, 350);
  EXPECT_NEAR(seen.at(2), 20'000 * std::exp(1.0) / total, 250);
  EXPECT_NEAR(seen.at(3), 20'000 * std::exp(2.0) / total, 350);
  EXPECT_EQ(seen.count(4), 0u);
}

TEST(Sampler, HotIsFlatter) { EXPECT_GT(draws({.temperature = 100}).at(4), 2000); }

TEST(Sampler, TopKAndTopP) {
  EXPECT_EQ(draws({.temperature = 1, .top_k = 1}).size(), 1u);
  EXPECT_EQ(draws({.temperature = 1, .top_k = 3}).size(), 3u);
  EXPECT_EQ(draws({.temperature = 1, .top_p = 0.3}).size(), 1u);
  EXPECT_EQ(draws({.temperature = 1, .top_p = 0.7}).size(), 2u);
  EXPECT_EQ(draws({.temperature = 1, .top_p = 0.0}).size(), 1u);
}

TEST(Sampler, OnlyTokensThatTheTokenizerHas) {
  const std::vector<float> logits = {1, 2, 9, 8};
  EXPECT_EQ(sample_token(logits, {.temperature = 0, .vocab = 2}, 0), 1);
  for (std::uint64_t i = 0; i < 100; ++i) EXPECT_LT(sample_token(logits, {.vocab = 2}, i), 2);
  EXPECT_EQ(sample_token(logits, {.temperature = 0, .vocab = 9}, 0), 2);
}

TEST(Sampler, SeedAndPositionDecide) {
  std::vector<std::int32_t> one, again, other;
  for (std::uint64_t i = 0; i < 50; ++i) {
    one.push_back(sample_token(kLogits, {.seed = 1}, i));
    again.push_back(sample_token(kLogits, {.seed = 1}, i));
    other.push_back(sample_token(kLogits, {.seed = 2}, i));
  }
  EXPECT_EQ(one, again);
  EXPECT_NE(one, other);
}

// The cache gives what a whole pass over the text would; past the context the later half goes on.
TEST(GenerateTokens, GoesOnPastTheContext) {
  ModelConfig config;
  config.vocab = 40;
  config.hidden = 32;
  config.layers = 2;
  config.heads = 2;
  config.kv_heads = 1;
  config.intermediate = 48;
  config.context = 8;
  ThreadPool pool(1);
  const ParameterLayout layout(config);
  FloatBuffer parameters(layout.size());
  initialise(layout, 1, pool, parameters.span());
  for (float& value : parameters.span()) value *= 8;  // far from even, so that draws differ
  Decoder decoder(layout, parameters.span(), Precision::kF32, pool);
  const SamplerOptions options{.temperature = 1, .seed = 5};
  const std::vector<std::int32_t> prompt = {1, 2, 3};
  std::vector<std::int32_t> text = prompt;
  generate_tokens(decoder, config.context, prompt, options, 30, std::nullopt,
                  [&](std::int32_t token) {
                    text.push_back(token);
                    return true;
                  });
  ASSERT_EQ(text.size(), 33u);

  // The same by whole passes: what the decoder has read when it draws token i.
  Transformer transformer(config, Precision::kF32, pool, 1, config.context);
  std::size_t begin = 0;
  for (std::size_t end = 3; end < text.size(); ++end) {
    if (end - begin > 8) begin = end - 4;
    const std::vector<std::int32_t> window(text.begin() + static_cast<std::ptrdiff_t>(begin),
                                           text.begin() + static_cast<std::ptrdiff_t>(end));
    std::vector<float> logits(window.size() * 40);
    transformer.logits(parameters.span(), {window, window, 1, static_cast<int>(window.size())},
                       logits);
    ASSERT_EQ(sample_token(std::span(logits).last(40), options, end - 3), text[end]) << end;
  }

  Decoder fresh(layout, parameters.span(), Precision::kF32, pool);
  std::vector<std::int32_t> cut;
  generate_tokens(fresh, config.context, prompt, options, 30, text[10], [&](std::int32_t token) {
    cut.push_back(token);
    return true;
  });
  EXPECT_LE(cut.size(), 7u);
}

}  // namespace
}  // namespace lockstep::sampler_test

#include "lockstep/model/cpu/decoder.h"

#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/base/random.h"
#include "lockstep/model/cpu/transformer.h"
#include "lockstep/model/gpu_decoder.h"
#include "lockstep/model/init.h"
#include "tests/support/pretended_gpu.h"

namespace lockstep::decoder_test {
namespace {

constexpr std::size_t kContext = 200;
constexpr std::size_t kVocab = 111;

class DecoderTest : public testing::TestWithParam<bool> {
 protected:
  DecoderTest() {
    initialise(layout_, 3, pool_, parameters_);
    for (float& value : parameters_) value *= 5.0f;
    for (std::size_t i = 0; i < kContext; ++i) {
      tokens_.push_back(static_cast<std::int32_t>(random_u64(1, 1, i) % kVocab));
    }
    Transformer model(layout_.config(), Precision::kF32, pool_, 1, kContext);
    model.logits(parameters_, {tokens_, tokens_, 1, kContext}, expected_);
  }

  void expect_logits(std::span<const float> logits, std::size_t position) const {
    ASSERT_EQ(logits.size(), kVocab);
    EXPECT_TRUE(std::equal(logits.begin(), logits.end(), expected_.begin() + position * kVocab))
        << "position " << position;
  }

  ParameterLayout layout_{{.vocab = kVocab,
                           .hidden = 64,
                           .layers = 2,
                           .heads = 4,
                           .kv_heads = 2,
                           .intermediate = 90,
                           .context = kContext,
                           .tie_embeddings = GetParam()}};
  ThreadPool pool_{2};
  std::vector<float> parameters_ = std::vector<float>(layout_.size());
  std::vector<std::int32_t> tokens_;
  std::vector<float> expected_ = std::vector<float>(kContext * kVocab);
};

INSTANTIATE_TEST_SUITE_P(Heads, DecoderTest, testing::Bool(),
                         [](const auto& test) { return test.param ? "Tied" : "Untied"; });

TEST_P(DecoderTest, TokenByTokenIsTheFullForwardPass) {
  Decoder decoder(layout_, parameters_, Precision::kF32, pool_);
  for (std::size_t i = 0; i < kContext; ++i) {
    expect_logits(decoder.logits_after(std::span(tokens_).subspan(i, 1)), i);
    EXPECT_EQ(decoder.length(), i + 1);
  }
}

TEST_P(DecoderTest, HoweverTheTokensAreCut) {
  for (const std::size_t cut : {3u, 64u, 130u, 200u}) {
    Decoder decoder(layout_, parameters_, Precision::kF32, pool_);
    for (std::size_t i = 0; i < kContext; i += cut) {
      const std::size_t count = std::min(cut, kContext - i);
      expect_logits(decoder.logits_after(std::span(tokens_).subspan(i, count)), i + count - 1);
    }
  }
}

TEST_P(DecoderTest, ForgetsWhatIsTruncated) {
  Decoder decoder(layout_, parameters_, Precision::kF32, pool_);
  std::vector<std::int32_t> others(tokens_.rbegin(), tokens_.rend());
  decoder.logits_after(std::span(tokens_).first(20));
  decoder.logits_after(std::span(others).first(50));
  decoder.truncate(20);
  expect_logits(decoder.logits_after(std::span(tokens_).subspan(20, 60)), 79);
}

TEST_P(DecoderTest, RefusesWhatDoesNotFit) {
  Decoder decoder(layout_, parameters_, Precision::kF32, pool_);
  const std::vector<std::int32_t> unknown = {5, 111};
  EXPECT_THROW(decoder.logits_after(unknown), Error);
  EXPECT_EQ(decoder.length(), 0u);
  decoder.logits_after(tokens_);
  EXPECT_THROW(decoder.logits_after(std::span(tokens_).first(1)), Error);
}

TEST_P(DecoderTest, OnAGpuItReadsTheSame) {
  auto model = std::make_unique<test::PretendedGpu>(
      gpu_decoder_options(layout_.config(), static_cast<int>(kContext)));
  model->set_parameters(parameters_);
  GpuDecoder decoder(std::move(model), static_cast<int>(kContext));
  const std::span tokens(tokens_);
  expect_logits(decoder.logits_after(tokens.first(7)), 6);
  expect_logits(decoder.logits_after(tokens.subspan(7, 1)), 7);
  expect_logits(decoder.logits_after(tokens.subspan(8)), kContext - 1);
  EXPECT_EQ(decoder.length(), kContext);
  EXPECT_THROW(decoder.logits_after(tokens.first(1)), Error);
  decoder.truncate(7);
  expect_logits(decoder.logits_after(tokens.subspan(7, 1)), 7);
}

}  // namespace
}  // namespace lockstep::decoder_test

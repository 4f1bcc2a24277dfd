#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "lockstep/base/error.h"
#include "lockstep/model/config.h"

namespace lockstep::model_config_test {
namespace {

constexpr ModelConfig kGood = {.vocab = 100,
                               .hidden = 64,
                               .layers = 2,
                               .heads = 8,
                               .kv_heads = 4,
                               .intermediate = 96,
                               .context = 32};

std::string refusal(const std::function<void(ModelConfig&)>& change) {
  ModelConfig config = kGood;
  change(config);
  try {
    validate(config);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return std::string(error.message());
  }
  return "accepted";
}

TEST(ModelConfig, NamesWhatIsWrong) {
  EXPECT_NO_THROW(validate(kGood));
  EXPECT_EQ(refusal([](auto& c) { c.vocab = 0; }), "model: vocab is 0, and must be at least 1");
  EXPECT_EQ(refusal([](auto& c) { c.layers = -1; }), "model: layers is -1, and must be at least 1");
  EXPECT_EQ(refusal([](auto& c) { c.context = 0; }), "model: context is 0, and must be at least 1");
  EXPECT_EQ(refusal([](auto& c) { c.intermediate = 1 << 30; }),
            "model: intermediate is 1073741824, and may be at most 16777216");
  EXPECT_EQ(refusal([](auto& c) { c.hidden = 72; }),
            "model: hidden is 72, and must be a multiple of 16");
  EXPECT_EQ(refusal([](auto& c) { c.heads = 7; }), "model: hidden 64 cannot be shared by 7 heads");
  EXPECT_EQ(refusal([](auto& c) { c.heads = c.kv_heads = 64; }),
            "model: a head has 1 values, and rotary embeddings need an even number");
  EXPECT_EQ(refusal([](auto& c) { c.kv_heads = 3; }),
            "model: 8 heads cannot share 3 heads of keys and values evenly (--kv-heads)");
  EXPECT_EQ(refusal([](auto& c) { c.rope_theta = 0.0f; }),
            "model: rope_theta is 0, and must be positive");
  EXPECT_EQ(refusal([](auto& c) { c.norm_eps = std::numeric_limits<float>::quiet_NaN(); }),
            "model: norm_eps is nan, and must be positive");
}

TEST(ModelConfig, NamedModelsAreValid) {
  for (const std::string& name : model_names()) {
    const auto config = named_model(name);
    ASSERT_TRUE(config) << name;
    EXPECT_NO_THROW(validate(*config)) << name;
  }
  EXPECT_FALSE(named_model("huge"));
}

}  // namespace
}  // namespace lockstep::model_config_test

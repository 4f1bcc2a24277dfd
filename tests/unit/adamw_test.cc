#include "lockstep/model/cpu/adamw.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/finite_difference.h"

namespace lockstep::adamw_test {
namespace {

using test::noise;

constexpr ModelConfig kConfig = {.vocab = 700,
                                 .hidden = 48,
                                 .layers = 2,
                                 .heads = 3,
                                 .kv_heads = 1,
                                 .intermediate = 50,
                                 .context = 8};
constexpr AdamWOptions kOptions = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};

struct State {
  std::vector<float> p, m, v;
};

// The update, one element at a time, as the header says.
void reference(const ParameterLayout& layout, const std::vector<float>& sum, float factor,
               double rate, std::int64_t step, State& state) {
  const double t = static_cast<double>(step + 1);
  const auto scaled_rate = static_cast<float>(rate / (1.0 - std::pow(0.9, t)));
  const auto root_scale = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(0.95, t)));
  const auto decayed = static_cast<float>(1.0 - rate * 0.1);
  for (const TensorSpec& tensor : layout.tensors()) {
    const float keep = tensor.cols == 1 ? 1.0f : decayed;
    for (std::size_t i = tensor.range.begin; i < tensor.range.end; ++i) {
      const float g = sum[i] * factor;
      const float m = 0.9f * state.m[i] + static_cast<float>(1.0 - 0.9) * g;
      const float v = 0.95f * state.v[i] + static_cast<float>(1.0 - 0.95) * (g * g);
      const float root = std::sqrt(v) * root_scale + 1e-8f;
      state.p[i] = state.p[i] * keep - scaled_rate * m / root;
      state.m[i] = m;
      state.v[i] = v;
    }
  }
}

TEST(AdamW, IsTheScalarReferenceToTheBit) {
  const ParameterLayout layout(kConfig);
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    AdamW optimizer(layout, kOptions);
    State state = {noise(layout.size(), 1), std::vector<float>(layout.size(), 0.0f),
                   std::vector<float>(layout.size(), 0.0f)};
    std::vector<float> parameters = state.p;
    for (int step = 0; step < 3; ++step) {
      const auto sum = noise(layout.size(), static_cast<std::uint64_t>(step + 2), 50.0f);
      optimizer.step(parameters, sum, 0.013f, 1e-2, step, pool);
      reference(layout, sum, 0.013f, 1e-2, step, state);
      ASSERT_EQ(parameters, state.p);
    }
    EXPECT_TRUE(std::equal(state.m.begin(), state.m.end(), optimizer.first_moment().begin()));
    EXPECT_TRUE(std::equal(state.v.begin(), state.v.end(), optimizer.second_moment().begin()));
  }
}

TEST(AdamW, ShardsTogetherAreTheWhole) {
  const ParameterLayout layout(kConfig);
  ThreadPool pool(2);
  const auto sum = noise(layout.size(), 2);
  std::vector<float> whole = noise(layout.size(), 1), sharded = whole;
  AdamW all(layout, kOptions);
  all.step(whole, sum, 0.5f, 1e-3, 0, pool);
  const std::size_t cuts[] = {0, 4096, 20480, layout.size()};
  for (int shard = 0; shard < 3; ++shard) {
    const Range range = {cuts[shard], cuts[shard + 1]};
    const std::vector<float> before = sharded;
    AdamW part(layout, kOptions, range);
    part.step(sharded, std::span(sum).subspan(range.begin, range.size()), 0.5f, 1e-3, 0, pool);
    EXPECT_EQ(part.first_moment().size(), range.size());
    for (std::size_t i = 0; i < sharded.size(); ++i) {
      if (i < range.begin || i >= range.end) {
        ASSERT_EQ(sharded[i], before[i]);
      }
    }
  }
  EXPECT_EQ(sharded, whole);
}

TEST(AdamW, NormsDoNotDecay) {
  const ParameterLayout layout(kConfig);
  ThreadPool pool(1);
  std::vector<float> parameters(layout.size(), 1.0f);
  AdamW optimizer(layout, kOptions);
  optimizer.step(parameters, std::vector<float>(layout.size(), 0.0f), 1.0f, 0.5, 0, pool);
  for (const TensorSpec& tensor : layout.tensors()) {
    EXPECT_EQ(parameters[tensor.range.begin], tensor.cols == 1 ? 1.0f : 0.95f) << tensor.name;
  }
}

}  // namespace
}  // namespace lockstep::adamw_test

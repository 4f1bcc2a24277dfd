#include "lockstep/model/init.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "lockstep/model/weights_hash.h"

namespace lockstep::init_test {
namespace {

constexpr ModelConfig kConfig = {.vocab = 1000,
                                 .hidden = 64,
                                 .layers = 2,
                                 .heads = 4,
                                 .kv_heads = 2,
                                 .intermediate = 100,
                                 .context = 8};

std::vector<float> fresh(const ParameterLayout& layout, std::uint64_t seed, int threads) {
  ThreadPool pool(threads);
  std::vector<float> parameters(layout.size(), -7.0f);
  initialise(layout, seed, pool, parameters);
  return parameters;
}

TEST(Initialise, SameBitsForAnyThreads) {
  const ParameterLayout layout(kConfig);
  const std::vector<float> one = fresh(layout, 5, 1);
  EXPECT_EQ(one, fresh(layout, 5, 2));
  EXPECT_EQ(one, fresh(layout, 5, 4));
  EXPECT_NE(one, fresh(layout, 6, 1));
  EXPECT_NE(one, fresh(layout, 5 + (std::uint64_t{1} << 32), 1));
}

TEST(Initialise, IsNormalWithTheDeviationsSaid) {
  const ParameterLayout layout(kConfig);
  const std::vector<float> parameters = fresh(layout, 1, 2);
  for (const TensorSpec& tensor : layout.tensors()) {
    double sum = 0.0, squares = 0.0, fourths = 0.0;
    for (std::size_t i = tensor.range.begin; i < tensor.range.end; ++i) {
      const double value = parameters[i];
      sum += value;
      squares += value * value;
      fourths += value * value * value * value;
    }
    const auto count = static_cast<double>(tensor.range.size());
    if (tensor.cols == 1) {
      EXPECT_EQ(sum, count) << tensor.name;
      continue;
    }
    const bool residual =
        tensor.component == Component::kOutput || tensor.component == Component::kDown;
    const double deviation = residual ? 0.02 / std::sqrt(4.0) : 0.02;
    EXPECT_NEAR(sum / count, 0.0, 5 * deviation / std::sqrt(count)) << tensor.name;
    EXPECT_NEAR(std::sqrt(squares / count) / deviation, 1.0, 5 / std::sqrt(2 * count))
        << tensor.name;
    EXPECT_NEAR(fourths / count / std::pow(deviation, 4), 3.0, 50 / std::sqrt(count))
        << tensor.name;
  }
}

TEST(Initialise, NothingRepeats) {
  const ParameterLayout layout(kConfig);
  const std::vector<float> parameters = fresh(layout, 1, 2);
  std::set<float> all;
  std::size_t count = 0;
  for (const TensorSpec& tensor : layout.tensors()) {
    if (tensor.cols == 1) continue;
    count += tensor.range.size();
    all.insert(parameters.begin() + static_cast<std::ptrdiff_t>(tensor.range.begin),
               parameters.begin() + static_cast<std::ptrdiff_t>(tensor.range.end));
  }
  EXPECT_GT(all.size(), count * 95 / 100);  // a few meet by chance
}

}  // namespace
}  // namespace lockstep::init_test

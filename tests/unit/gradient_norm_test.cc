#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/model/cpu/adamw.h"
#include "tests/support/finite_difference.h"

namespace lockstep::gradient_norm_test {
namespace {

using test::noise;

double norm_squared(const std::vector<float>& values, int threads) {
  ThreadPool pool(threads);
  std::vector<double> sums(norm_blocks(values.size()));
  return sum_of_squares(values, pool, sums);
}

TEST(GradientNorm, SameBitsForAnyThreadsAndShards) {
  for (const std::size_t size : {1u, 4095u, 4096u, 4097u, 100000u}) {
    const std::vector<float> values = noise(size, 1);
    const double one = norm_squared(values, 1);
    double plain = 0.0;
    for (const float value : values) plain += static_cast<double>(value) * value;
    EXPECT_NEAR(one, plain, 1e-12 * plain);
    EXPECT_EQ(one, norm_squared(values, 2));
    EXPECT_EQ(one, norm_squared(values, 5));

    // Two shards that exchange their block sums.
    ThreadPool pool(1);
    const std::size_t cut = norm_blocks(size) / 2;
    std::vector<double> sums(norm_blocks(size));
    const std::span<const float> all(values);
    block_squares(all.first(cut * kNormBlock), pool, std::span(sums).first(cut));
    block_squares(all.subspan(cut * kNormBlock), pool, std::span(sums).subspan(cut));
    EXPECT_EQ(one, tree_sum(sums));
  }
}

TEST(GradientNorm, AddsBlocksInTheCanonicalTree) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    std::vector<double> v = test::widened(noise(7, seed));
    for (double& value : v) value /= 3.0;  // with digits to lose
    EXPECT_EQ(tree_sum(v), ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + v[6]));
    EXPECT_EQ(tree_sum(std::span(v).first(5)), ((v[0] + v[1]) + (v[2] + v[3])) + v[4]);
  }
  EXPECT_EQ(tree_sum({}), 0.0);
}

TEST(GradientNorm, TellsWhetherAllIsFinite) {
  std::vector<float> values = noise(9000, 1, std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isfinite(norm_squared(values, 1)));
  values[8999] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(std::isfinite(norm_squared(values, 1)));
  values[8999] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(std::isfinite(norm_squared(values, 1)));
}

TEST(GradientFactor, ClipsTheMeanGradient) {
  EXPECT_EQ(gradient_factor(10.0, 100, 1.0),
            static_cast<float>(1.0 / 100.0));  // norm 0.1: as it is
  // A mean gradient of norm 3, cut to 0.7.
  EXPECT_EQ(gradient_factor(300.0, 100, 0.7), static_cast<float>(0.7 / (300.0 / 100.0) / 100.0));
  EXPECT_EQ(gradient_factor(300.0, 100, 0.0), static_cast<float>(1.0 / 100.0));  // never
  EXPECT_EQ(gradient_factor(0.0, 100, 1.0), static_cast<float>(1.0 / 100.0));
}

}  // namespace
}  // namespace lockstep::gradient_norm_test

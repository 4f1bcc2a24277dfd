// The small examples of all-reduce that started the project: means over two and three workers.

#include <gtest/gtest.h>

#include "tests/support/places.h"

namespace lockstep::test::seeds_test {
namespace {

using Vectors = std::vector<std::vector<float>>;

class Means : public testing::TestWithParam<Place> {
 protected:
  // Every rank must end with `expected`, and all with the same bits.
  void expect_mean(const Vectors& inputs, const std::vector<float>& expected, Algorithm algorithm,
                   float tolerance) {
    Vectors results(inputs.size());
    kept_group(GetParam().medium, static_cast<int>(inputs.size())).run([&](Communicator& comm) {
      std::vector<float> data = inputs[static_cast<std::size_t>(comm.rank())];
      CallOptions options;
      options.algorithm = algorithm;
      comm.all_reduce(std::span(data), ReduceOp::kMean, options);
      results[static_cast<std::size_t>(comm.rank())] = data;
    });
    ASSERT_EQ(results[0].size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(results[0][i], expected[i], tolerance) << "element " << i;
    }
    for (const auto& result : results) EXPECT_EQ(result, results[0]);
  }
  void expect_mean(const Vectors& inputs, const std::vector<float>& expected,
                   float tolerance = 1e-5F) {
    expect_mean(inputs, expected, Algorithm::kRing, tolerance);
    expect_mean(inputs, expected, Algorithm::kPair, tolerance);
    expect_mean(inputs, expected, Algorithm::kAuto, tolerance);
  }
};

TEST_P(Means, TwoWorkersWithTheSame) { expect_mean({{1, 2, 3}, {1, 2, 3}}, {1, 2, 3}, 0); }
TEST_P(Means, TwoWorkersWithDifferent) { expect_mean({{2, 4, 6}, {8, 6, 4}}, {5, 5, 5}, 0); }
TEST_P(Means, ThreeWorkers) {
  expect_mean({{1, 0, 0}, {0, 1, 0}, {0, 0, 1}}, std::vector<float>(3, 1.0F / 3));
}
TEST_P(Means, LengthThatDoesNotDivide) {
  expect_mean({{1, 2, 3, 4, 5, 6, 7}, {7, 6, 5, 4, 3, 2, 1}, std::vector<float>(7)},
              std::vector<float>(7, 8.0F / 3));
}
TEST_P(Means, LargeVector) {
  constexpr std::size_t kLength = 100'000;
  Vectors inputs(2, std::vector<float>(kLength));
  for (std::size_t i = 0; i < kLength; ++i) {
    inputs[0][i] = static_cast<float>(i);
    inputs[1][i] = static_cast<float>(kLength - 1 - i);
  }
  expect_mean(inputs, std::vector<float>(kLength, (kLength - 1) / 2.0F), 0);
}
TEST_P(Means, Pair) {
  expect_mean({{10, 20, 30}, {30, 20, 10}}, {20, 20, 20}, Algorithm::kPair, 0);
}

constexpr int kSizes[] = {3};
INSTANTIATE_TEST_SUITE_P(
    All, Means,
    testing::ValuesIn(places({GroupMedium::kLocal, GroupMedium::kTcp, GroupMedium::kShm}, kSizes)),
    place_name);

}  // namespace
}  // namespace lockstep::test::seeds_test

#include "lockstep/server/average.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "lockstep/base/random.h"

namespace lockstep::average_test {
namespace {

using Vectors = std::vector<std::vector<float>>;

Vectors random_vectors(std::size_t workers, std::size_t count) {
  Vectors vectors(workers, std::vector<float>(count));
  for (std::size_t w = 0; w < workers; ++w) {
    for (std::size_t i = 0; i < count; ++i) vectors[w][i] = random_f32(7, w, i) * 2 - 1;
  }
  return vectors;
}

// The tree as the definition says it, element by element.
float tree(const std::function<float(std::size_t)>& leaf, std::size_t begin, std::size_t end) {
  if (end - begin == 1) return leaf(begin);
  const std::size_t middle = begin + std::bit_floor(end - begin - 1);
  return tree(leaf, begin, middle) + tree(leaf, middle, end);
}

// Runs the averager over pieces of `piece` elements.
std::vector<float> average(Averager& averager, Vectors vectors, std::size_t piece) {
  const std::size_t count = vectors[0].size();
  std::vector<float> out(count);
  for (std::size_t done = 0; done < count; done += piece) {
    std::vector<const std::byte*> inputs;
    for (auto& each : vectors) inputs.push_back(reinterpret_cast<std::byte*>(&each[done]));
    EXPECT_FALSE(averager.run(inputs, &out[done], std::min(piece, count - done)));
  }
  return out;
}

TEST(Average, MeanIsTheTreeSumTimesTheReciprocal) {
  for (const std::size_t workers : {1, 2, 3, 5, 8}) {
    const Vectors vectors = random_vectors(workers, 5000);
    Averager averager(Average::kMean, std::vector<std::uint64_t>(workers));
    const auto got = average(averager, vectors, 5000);
    const auto factor = static_cast<float>(1.0 / static_cast<double>(workers));
    for (std::size_t i = 0; i < got.size(); ++i) {
      const float sum = tree([&](std::size_t w) { return vectors[w][i]; }, 0, workers);
      ASSERT_EQ(std::bit_cast<std::uint32_t>(got[i]), std::bit_cast<std::uint32_t>(sum * factor))
          << workers << " workers, element " << i;
    }
  }
}

TEST(Average, WeightedIsTheTreeOfProductsTimesTheReciprocal) {
  const std::vector<std::uint64_t> weights = {3, 0, 100, 16777217, 5};
  const Vectors vectors = random_vectors(weights.size(), 3000);
  Averager averager(Average::kWeighted, weights);
  const auto got = average(averager, vectors, 3000);
  const auto factor = static_cast<float>(1.0 / 16777325.0);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const float sum =
        tree([&](std::size_t w) { return static_cast<float>(weights[w]) * vectors[w][i]; }, 0,
             weights.size());
    ASSERT_EQ(std::bit_cast<std::uint32_t>(got[i]), std::bit_cast<std::uint32_t>(sum * factor));
  }
}

TEST(Average, DoesNotDependOnWhereItIsCut) {
  const Vectors vectors = random_vectors(4, 9000);
  Averager averager(Average::kWeighted, {1, 2, 3, 4});
  const auto whole = average(averager, vectors, 9000);
  for (const std::size_t piece : {1, 7, 2048, 4097}) {
    EXPECT_EQ(average(averager, vectors, piece), whole) << piece;
  }
}

TEST(Average, NoWeightAtAllGivesZero) {
  Vectors vectors = random_vectors(3, 10);
  vectors[1][4] = -1;  // times 0 that is -0
  Averager averager(Average::kWeighted, {0, 0, 0});
  for (const float value : average(averager, vectors, 10)) {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(value), 0U);
  }
}

TEST(Average, NamesWorkerElementAndValueOfADefect) {
  for (const float bad :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    Vectors vectors = random_vectors(3, 6000);
    vectors[2][5001] = bad;
    std::vector<const std::byte*> inputs;
    for (auto& each : vectors) inputs.push_back(reinterpret_cast<std::byte*>(each.data()));
    std::vector<float> out(6000);
    Averager averager(Average::kWeighted, {1, 1, 1});
    const auto defect = averager.run(inputs, out.data(), 6000);
    ASSERT_TRUE(defect);
    EXPECT_EQ(defect->worker, 2);
    EXPECT_EQ(defect->index, 5001U);
    EXPECT_EQ(defect->value, bad);
  }
}

TEST(Average, NoticesASumThatOverflows) {
  std::vector<float> big(8, 3e38F);
  std::vector<float> other = big;
  std::vector<const std::byte*> inputs = {reinterpret_cast<std::byte*>(big.data()),
                                          reinterpret_cast<std::byte*>(other.data())};
  std::vector<float> out(8);
  Averager averager(Average::kMean, {1, 1});
  const auto defect = averager.run(inputs, out.data(), 8);
  ASSERT_TRUE(defect);
  EXPECT_EQ(defect->worker, -1);
  EXPECT_EQ(defect->index, 0U);
}

TEST(Average, TreeSumOfNumbers) {
  const std::vector<double> values = {1e16, 1, -1e16, 1, 1};
  EXPECT_EQ(tree_sum(values), (((1e16 + 1) + (-1e16 + 1)) + 1));
}

}  // namespace
}  // namespace lockstep::average_test

#include "lockstep/data/lanes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "lockstep/base/error.h"

namespace lockstep::lanes_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<std::uint64_t> order(std::uint64_t size, std::uint64_t seed, std::uint64_t epoch) {
  const EpochPermutation permutation(size, seed, epoch);
  std::vector<std::uint64_t> images(size);
  for (std::uint64_t i = 0; i < size; ++i) images[i] = permutation(i);
  return images;
}

TEST(EpochPermutation, IsAPermutationOfEverySize) {
  for (std::uint64_t size = 1; size <= 300; ++size) {
    auto images = order(size, 3, size % 5);
    std::ranges::sort(images);
    for (std::uint64_t i = 0; i < size; ++i) ASSERT_EQ(images[i], i) << size;
  }
}

TEST(EpochPermutation, ReachesFarAndStaysInside) {
  const std::uint64_t size = (std::uint64_t{1} << 40) + 12345;
  const EpochPermutation permutation(size, 1, 2);
  std::map<std::uint64_t, int> eighths;
  for (std::uint64_t i = 0; i < 4000; ++i) {
    const std::uint64_t image = permutation(size - 1 - i);
    ASSERT_LT(image, size);
    ++eighths[image / (size / 8 + 1)];
  }
  ASSERT_EQ(eighths.size(), 8u);
  for (const auto& [eighth, count] : eighths) EXPECT_NEAR(count, 500, 110) << eighth;  // 5 sigma
}

TEST(EpochPermutation, SeedsAndEpochsDiffer) {
  EXPECT_EQ(order(100, 1, 1), order(100, 1, 1));
  EXPECT_NE(order(100, 1, 1), order(100, 1, 2));
  EXPECT_NE(order(100, 1, 1), order(100, 2, 1));
}

// Part of the result of every run.
TEST(EpochPermutation, NeverChanges) {
  EXPECT_THAT(order(10, 0, 0), ElementsAre(7, 6, 0, 2, 8, 5, 1, 4, 3, 9));
  EXPECT_THAT(order(7, 42, 3), ElementsAre(4, 5, 3, 6, 2, 1, 0));
}

// Whatever the batch, each sample comes once per epoch, and lanes do not depend on one another.
TEST(LanePlan, EverySampleOncePerEpoch) {
  const std::vector<LanePlan> plans = {
      {100, 5, 10, 5}, {101, 5, 12, 3}, {7, 5, 16, 4}, {1, 5, 2, 1}, {64, 5, 64, 64}};
  for (const LanePlan& plan : plans) {
    validate(plan);
    std::vector<std::uint64_t> stream;
    const std::uint64_t steps = (3 * plan.samples + plan.global_batch - 1) / plan.global_batch;
    for (std::uint64_t step = 0; step < steps; ++step) {
      for (std::uint32_t lane = 0; lane < plan.lanes(); ++lane) {
        std::vector<std::uint64_t> ids(plan.micro_batch);
        plan.sample_ids(step, lane, ids);
        stream.insert(stream.end(), ids.begin(), ids.end());
      }
    }
    for (std::uint64_t epoch = 0; epoch < 3; ++epoch) {
      const auto whole = std::span(stream).subspan(epoch * plan.samples, plan.samples);
      std::vector<std::uint64_t> pass(whole.begin(), whole.end());
      std::ranges::sort(pass);
      for (std::uint64_t i = 0; i < plan.samples; ++i) ASSERT_EQ(pass[i], i);
    }
  }
}

TEST(LanePlan, MicroBatchCutsTheSameStream) {
  const LanePlan whole{1000, 8, 24, 24};
  const LanePlan cut{1000, 8, 24, 6};
  std::vector<std::uint64_t> a(24), b(6);
  whole.sample_ids(17, 0, a);
  for (std::uint32_t lane = 0; lane < cut.lanes(); ++lane) {
    cut.sample_ids(17, lane, b);
    EXPECT_TRUE(std::ranges::equal(b, std::span(a).subspan(lane * 6, 6)));
  }
}

TEST(LanePlan, WrongUsage) {
  EXPECT_THROW(validate(LanePlan{0, 1, 8, 8}), Error);
  EXPECT_THROW(validate(LanePlan{9, 1, 8, 3}), Error);
  EXPECT_THROW(validate(LanePlan{9, 1, 8, 0}), Error);
  EXPECT_NO_THROW(validate(LanePlan{9, 1, 8, 2}));
}

TEST(ShardBatches, DealtOutInTurn) {
  EXPECT_THAT(shard_batches(10, 0, 2), ElementsAre(0, 2, 4, 6, 8));
  EXPECT_THAT(shard_batches(10, 1, 2), ElementsAre(1, 3, 5, 7, 9));
  EXPECT_THAT(shard_batches(7, 0, 3), ElementsAre(0, 3, 6));
  EXPECT_THAT(shard_batches(7, 1, 3), ElementsAre(1, 4));
  EXPECT_THAT(shard_batches(7, 2, 3), ElementsAre(2, 5));
  EXPECT_THAT(shard_batches(5, 0, 1), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(shard_batches(2, 1, 4), ElementsAre(1));
  EXPECT_THAT(shard_batches(2, 2, 4), IsEmpty());
}

}  // namespace
}  // namespace lockstep::lanes_test

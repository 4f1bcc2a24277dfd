#include "lockstep/data/mix.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <span>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/data/lanes.h"

namespace lockstep::mix_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string refusal(std::string_view text) {
  try {
    parse_mix(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

TEST(Mix, WeightsBecomeSharesThatAddUp) {
  EXPECT_THAT(apportion(std::vector<double>{3, 1}, kMixBlock), ElementsAre(7500, 2500));
  EXPECT_THAT(apportion(std::vector<double>{0.7, 0.2, 0.1}, kMixBlock),
              ElementsAre(7000, 2000, 1000));
  EXPECT_THAT(apportion(std::vector<double>{1, 1, 1}, kMixBlock), ElementsAre(3334, 3333, 3333));
  EXPECT_THAT(apportion(std::vector<double>{1, 0, 2}, 2), ElementsAre(1, 0, 1));
}

TEST(Mix, WeightsAreRead) {
  EXPECT_THAT(parse_mix(""), ElementsAre());
  EXPECT_THAT(parse_mix("3,1"), ElementsAre(3.0, 1.0));
  EXPECT_THAT(parse_mix(".5,1e2"), ElementsAre(0.5, 100.0));
  for (const char* text : {"3,", ",", "3,,1", "3,-1", "3,0", "3,x", "inf,1", "nan", "3 1"}) {
    EXPECT_THAT(refusal(text), HasSubstr("positive number")) << text;
  }
  EXPECT_THAT(refusal("1e308,1e308"), HasSubstr("too large to be added up"));
  EXPECT_THAT(refusal("1000000,1"), HasSubstr("1 is less than one in 10000 of all"));
}

// Of every block each part has exactly its share, and walks through all of its samples before one
// comes again.
TEST(Mix, SharesAreExactAndEverySampleComesOncePerPass) {
  const std::vector<MixPart> parts = {{100, 7000}, {9, 1000}, {3'000, 2000}};
  std::vector<std::vector<std::uint64_t>> drawn(parts.size());
  for (std::uint64_t position = 0; position < 2 * kMixBlock; ++position) {
    std::uint64_t sample = mixed_sample(parts, 5, position);
    std::size_t part = 0;
    for (; sample >= parts[part].samples; ++part) sample -= parts[part].samples;
    ASSERT_LT(part, parts.size());
    drawn[part].push_back(sample);
    if (position + 1 == kMixBlock) {
      EXPECT_EQ(drawn[0].size(), 7000u);
      EXPECT_EQ(drawn[1].size(), 1000u);
      EXPECT_EQ(drawn[2].size(), 2000u);
    }
  }
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const std::uint64_t size = parts[part].samples;
    for (std::uint64_t begin = 0; begin + size <= drawn[part].size(); begin += size) {
      const auto pass = std::span(drawn[part]).subspan(begin, size);
      std::set<std::uint64_t> seen(pass.begin(), pass.end());
      EXPECT_EQ(seen.size(), size) << "part " << part << " from " << begin;
    }
  }
}

TEST(Mix, EveryStepHasTheShares) {
  const LanePlan plan = {143, 3, 100, 10, {{100, 6000}, {30, 3000}, {13, 1000}}};
  validate(plan);
  std::vector<std::uint64_t> ids(10);
  for (std::uint64_t step = 0; step < 50; ++step) {
    std::array<int, 3> counts = {};
    for (std::uint32_t lane = 0; lane < plan.lanes(); ++lane) {
      plan.sample_ids(step, lane, ids);
      for (const std::uint64_t id : ids) ++counts[id < 100 ? 0 : id < 130 ? 1 : 2];
    }
    EXPECT_NEAR(counts[0], 60, 1) << step;
    EXPECT_NEAR(counts[1], 30, 1) << step;
    EXPECT_NEAR(counts[2], 10, 1) << step;
  }
}

TEST(Mix, MicroBatchCutsTheSameStream) {
  const std::vector<MixPart> parts = {{70, 5000}, {930, 5000}};
  const LanePlan whole = {1000, 8, 24, 24, parts};
  const LanePlan cut = {1000, 8, 24, 6, parts};
  std::vector<std::uint64_t> a(24), b(6);
  whole.sample_ids(417, 0, a);
  for (std::uint32_t lane = 0; lane < cut.lanes(); ++lane) {
    cut.sample_ids(417, lane, b);
    EXPECT_TRUE(std::ranges::equal(b, std::span(a).subspan(lane * 6, 6)));
  }
}

TEST(Mix, NeverChanges) {
  const std::vector<MixPart> parts = {{100, 7000}, {9, 3000}};
  std::vector<std::uint64_t> samples;
  for (std::uint64_t i = 0; i < 8; ++i) samples.push_back(mixed_sample(parts, 42, 12'345 + i));
  EXPECT_THAT(samples, ElementsAre(105, 32, 76, 104, 73, 0, 107, 67));
}

TEST(Mix, ValidationHasTheSameShares) {
  EXPECT_THAT(spread_samples(std::vector<MixPart>{{10, kMixBlock}}, 4), ElementsAre(0, 2, 5, 7));
  EXPECT_THAT(spread_samples(std::vector<MixPart>{{100, 5000}, {1, 5000}}, 4),
              ElementsAre(0, 50, 100, 100));
  EXPECT_THAT(spread_samples(std::vector<MixPart>{{0, 5000}, {3, 5000}}, 2), ElementsAre(0, 1));
  EXPECT_THAT(spread_samples(std::vector<MixPart>{{0, kMixBlock}}, 0), ElementsAre());
}

TEST(Mix, PlansThatDoNotAddUpAreRefused) {
  EXPECT_NO_THROW(validate(LanePlan{9, 1, 8, 2, {{5, 1000}, {4, 9000}}}));
  EXPECT_THROW(validate(LanePlan{9, 1, 8, 2, {{5, 1000}, {4, 1000}}}), Error);
  EXPECT_THROW(validate(LanePlan{9, 1, 8, 2, {{5, 1000}, {5, 9000}}}), Error);
  EXPECT_THROW(validate(LanePlan{9, 1, 8, 2, {{9, 1000}, {0, 9000}}}), Error);
}

}  // namespace
}  // namespace lockstep::mix_test

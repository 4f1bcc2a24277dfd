#include "lockstep/train/killing_lanes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace lockstep::killing_lanes_test {
namespace {

using Lanes = std::vector<std::uint32_t>;

TEST(KillingLanes, AreThoseThatWereThereThreeTimes) {
  KillingLanes lanes;
  lanes.lost(7, 1, Lanes{4, 5, 6, 7}, "signal 11");
  lanes.lost(7, 2, Lanes{3, 4, 5, 6}, "signal 11");
  EXPECT_FALSE(lanes.finding());
  lanes.lost(7, 3, Lanes{0, 1, 2, 3, 4, 5}, "signal 6");
  const auto found = lanes.finding();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->step, 7);
  EXPECT_EQ(found->lanes, (Lanes{4, 5}));
  EXPECT_EQ(found->how, "signal 6");
}

TEST(KillingLanes, WhoIsLostTogetherCountsOnce) {
  KillingLanes lanes;
  for (const Lanes& of_rank : {Lanes{0, 1}, Lanes{2, 3}, Lanes{4, 5}}) {
    lanes.lost(7, 1, of_rank, "x");
  }
  EXPECT_FALSE(lanes.finding());
  lanes.lost(7, 2, Lanes{3}, "x");
  lanes.lost(7, 3, Lanes{2, 3}, "x");
  EXPECT_EQ(lanes.finding()->lanes, Lanes{3});
}

TEST(KillingLanes, WithoutALaneInCommonThereIsNone) {
  KillingLanes lanes;
  lanes.lost(7, 1, Lanes{0, 1}, "x");
  lanes.lost(7, 2, Lanes{1, 2}, "x");
  lanes.lost(7, 3, Lanes{2, 3}, "x");
  EXPECT_FALSE(lanes.finding());
  lanes.lost(7, 4, Lanes{2, 4}, "x");  // the last three of them had
  EXPECT_EQ(lanes.finding()->lanes, Lanes{2});
}

TEST(KillingLanes, AStepThatIsDoneBeginsAnew) {
  KillingLanes lanes;
  lanes.lost(7, 1, Lanes{0}, "x");
  lanes.lost(7, 2, Lanes{0}, "x");
  lanes.done(6);
  lanes.lost(8, 3, Lanes{0}, "x");  // another step
  EXPECT_FALSE(lanes.finding());
  lanes.lost(8, 4, Lanes{0}, "x");
  lanes.done(8);
  lanes.lost(9, 5, Lanes{0}, "x");
  EXPECT_FALSE(lanes.finding());
}

TEST(KillingLanes, BecomeAReportThatCanBeReadAgain) {
  const LanePlan plan = {.samples = 100, .seed = 3, .global_batch = 8, .micro_batch = 2};
  const HaltReport report = halt_report({7, {1, 3}, "signal 11 (Segmentation fault)"}, plan);
  EXPECT_EQ(report.what, "crash");
  EXPECT_EQ(report.lane, 1U);
  std::vector<std::uint64_t> samples(2);
  plan.sample_ids(6, 1, samples);
  EXPECT_EQ(report.samples, samples);
  ASSERT_EQ(report.lanes().size(), 2U);
  EXPECT_EQ(report.lanes()[1].lane, 3U);
  plan.sample_ids(6, 3, samples);
  EXPECT_EQ(report.lanes()[1].samples, samples);
  EXPECT_EQ(parse_halt_report(to_json(report)), report);
  EXPECT_THAT(to_string(report),
              ::testing::MatchesRegex(
                  "step 7: workers crashed again and again, and every one of them had lane 1 "
                  ".samples [0-9, ]+., lane 3 .samples [0-9, ]+.; the last one: signal 11 "
                  ".Segmentation fault.; no weights were changed"));
}

}  // namespace
}  // namespace lockstep::killing_lanes_test

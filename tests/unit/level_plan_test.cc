#include "lockstep/train/level_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::level_plan_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

LevelStanding at_step(std::int64_t step, Range moments) {
  LevelStanding standing;
  standing.has_state = true;
  standing.step = step;
  standing.moments = {{moments, step}};
  return standing;
}

TEST(LevelPlan, NobodyGoesBack) {
  const Range all = {0, 100};
  const std::vector<LevelStanding> ranks = {at_step(4, all), {}, at_step(5, all), at_step(5, all)};
  const LevelPlan plan = plan_levelling(ranks, 100, {});
  EXPECT_FALSE(plan.lost);
  EXPECT_EQ(plan.step, 5);
  EXPECT_EQ(plan.teller, 2);
  EXPECT_FALSE(plan.closed);
  EXPECT_THAT(plan.parameters, ElementsAre(StateTransfer{2, 0, all}, StateTransfer{2, 1, all}));
  EXPECT_EQ(plan.moments, plan.parameters);
  EXPECT_TRUE(plan_levelling(std::vector<LevelStanding>(3), 100, {}).lost);
}

TEST(LevelPlan, ShardsGoToTheirNewHolders) {
  ReducerOptions reducer;
  reducer.shard = true;
  constexpr std::size_t kSize = 4 * 4096;
  // Of four ranks, whose pairs have half each, 1 and 3 are left.
  std::vector<LevelStanding> ranks = {at_step(7, {0, kSize / 2}), at_step(7, {kSize / 2, kSize})};
  for (LevelStanding& rank : ranks) rank.closed = true;
  LevelPlan plan = plan_levelling(ranks, kSize, reducer);
  EXPECT_FALSE(plan.lost);
  EXPECT_TRUE(plan.closed);
  EXPECT_THAT(plan.parameters, IsEmpty());
  EXPECT_THAT(
      plan.moments,
      ElementsAre(StateTransfer{0, 0, {0, kSize / 2}}, StateTransfer{1, 0, {kSize / 2, kSize}},
                  StateTransfer{0, 1, {0, kSize / 2}}, StateTransfer{1, 1, {kSize / 2, kSize}}));
  ranks[1].moments[0].step = 6;  // of an earlier step, and nothing to bring them forward with
  EXPECT_TRUE(plan_levelling(ranks, kSize, reducer).lost);
  ranks[1].moments.clear();
  EXPECT_TRUE(plan_levelling(ranks, kSize, reducer).lost);
}

TEST(LevelPlan, ANewcomerGetsOnlyTheMomentsThatItWillHold) {
  ReducerOptions reducer;
  reducer.shard = true;
  constexpr std::size_t kSize = 12 * 4096;
  for (const int workers : {2, 4}) {
    std::vector<LevelStanding> ranks;
    for (int rank = 0; rank < workers; ++rank) {
      ranks.push_back(at_step(7, held_range(reducer, kSize, rank, workers)));
    }
    ranks.emplace_back();
    const LevelPlan plan = plan_levelling(ranks, kSize, reducer);
    EXPECT_THAT(plan.parameters, ElementsAre(StateTransfer{0, workers, {0, kSize}}));
    std::size_t moments = 0;
    for (const StateTransfer& transfer : plan.moments) {
      if (transfer.to == workers) moments += transfer.range.size();
    }
    EXPECT_EQ(moments, held_range(reducer, kSize, workers, workers + 1).size());
  }
}

TEST(LevelPlan, SumsAreOfUseOnlyWithTheirNorm) {
  ReducerOptions reducer;
  reducer.shard = true;
  constexpr std::size_t kSize = 4 * 4096;
  const Range halves[] = {{0, kSize / 2}, {kSize / 2, kSize}};
  std::vector<LevelStanding> ranks = {at_step(7, halves[0]), at_step(7, halves[1])};
  for (std::size_t i = 0; i < 2; ++i) {
    ranks[i].summed = true;
    ranks[i].held = halves[i];
  }
  LevelPlan plan = plan_levelling(ranks, kSize, reducer);
  EXPECT_EQ(plan.step, 7);
  EXPECT_THAT(plan.updates, ElementsAre(false, false));
  EXPECT_THAT(plan.parameters, IsEmpty());
  ranks[1].decided = true;
  plan = plan_levelling(ranks, kSize, reducer);
  EXPECT_EQ(plan.step, 8);
  EXPECT_EQ(plan.teller, 1);
  EXPECT_THAT(plan.updates, ElementsAre(true, true));
  EXPECT_THAT(plan.parameters,
              ElementsAre(StateTransfer{0, 0, halves[0]}, StateTransfer{1, 0, halves[1]},
                          StateTransfer{0, 1, halves[0]}, StateTransfer{1, 1, halves[1]}));
  ranks[0].summed = false;  // it cannot be, and is not believed
  EXPECT_TRUE(plan_levelling(ranks, kSize, reducer).lost);
}

}  // namespace
}  // namespace lockstep::level_plan_test

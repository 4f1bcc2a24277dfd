#include "lockstep/train/lane_balance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "lockstep/base/index.h"
#include "lockstep/base/random.h"

namespace lockstep::lane_balance_test {
namespace {

using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::Le;

constexpr double kCommunication = 0.001;

std::vector<std::uint32_t> counts(const LeafOwners& owners, int ranks) {
  return lanes_by_rank(owners, ranks);
}

bool is_run_per_rank(const LeafOwners& owners, int ranks) {
  return std::ranges::is_sorted(owners) && std::ranges::count(counts(owners, ranks), 0U) == 0;
}

// What the tail of a step says when ranks take so many seconds per lane: who is done early waits.
std::vector<PhaseTimes> step_of(const LeafOwners& owners, std::span<const double> per_lane,
                                double communication = kCommunication) {
  const auto lanes = counts(owners, static_cast<int>(per_lane.size()));
  double slowest = 0;
  for (std::size_t r = 0; r < lanes.size(); ++r)
    slowest = std::max(slowest, lanes[r] * per_lane[r]);
  std::vector<PhaseTimes> phases(lanes.size());
  for (std::size_t r = 0; r < lanes.size(); ++r) {
    phases[r][Phase::kForward] = lanes[r] * per_lane[r] / 3;
    phases[r][Phase::kBackward] = lanes[r] * per_lane[r] / 3 * 2;
    phases[r][Phase::kCommunication] = slowest - lanes[r] * per_lane[r] + communication;
  }
  return phases;
}

// Steps until the lanes move; -1 when they do not within `most`.
int steps_until_move(LaneBalance& balance, std::span<const double> per_lane, int most) {
  for (int step = 1; step <= most; ++step) {
    if (balance.add_step(step_of(balance.owners(), per_lane))) return step;
  }
  return -1;
}

TEST(DealLanes, SharesFollowSpeed) {
  const std::vector<std::uint32_t> plenty(4, 100);
  const double slow[] = {0.3, 0.1, 0.1, 0.1};
  EXPECT_THAT(counts(deal_lanes(40, slow, plenty, 0), 4), ElementsAre(4, 12, 12, 12));
  const double equal[] = {0.1, 0.1, 0.1, 0.1};
  EXPECT_THAT(counts(deal_lanes(32, equal, plenty, 0), 4), ElementsAre(8, 8, 8, 8));
  const double all_differ[] = {0.1, 0.2, 0.4, 0.8};
  EXPECT_THAT(counts(deal_lanes(15, all_differ, plenty, 0), 4), ElementsAre(8, 4, 2, 1));
}

TEST(DealLanes, EveryRankKeepsALane) {
  const std::vector<std::uint32_t> plenty(3, 100);
  const double very_slow[] = {1e-3, 100, 1e-3};
  const LeafOwners dealt = deal_lanes(9, very_slow, plenty, 0);
  EXPECT_TRUE(is_run_per_rank(dealt, 3));
  EXPECT_EQ(counts(dealt, 3)[1], 1U);
  EXPECT_THAT(counts(deal_lanes(3, very_slow, plenty, 0), 3), ElementsAre(1, 1, 1));
}

// The best deal of all, found by trying every one.
TEST(DealLanes, IsTheFastestDeal) {
  const std::vector<std::uint32_t> plenty(3, 100);
  for (std::uint64_t round = 0; round < 30; ++round) {
    const std::size_t lanes = 3 + random_u64(5, round, 0) % 14;
    std::vector<double> per_lane;
    for (std::uint64_t r = 1; r <= 3; ++r) per_lane.push_back(0.1 + random_f32(5, round, r));
    double best = 1e9;
    for (std::size_t a = 1; a + 1 < lanes; ++a) {
      for (std::size_t b = a + 1; b < lanes; ++b) {
        best = std::min(best, std::max({static_cast<double>(a) * per_lane[0],
                                        static_cast<double>(b - a) * per_lane[1],
                                        static_cast<double>(lanes - b) * per_lane[2]}));
      }
    }
    const auto dealt = counts(deal_lanes(lanes, per_lane, plenty, 0), 3);
    double slowest = 0;
    for (std::size_t r = 0; r < 3; ++r) slowest = std::max(slowest, dealt[r] * per_lane[r]);
    EXPECT_DOUBLE_EQ(slowest, best) << lanes << " lanes";
  }
}

// Where partials cost time, cuts go where few of them arise.
TEST(DealLanes, PrefersFewPartials) {
  const std::vector<std::uint32_t> plenty(2, 100);
  const double per_lane[] = {0.107, 0.1};
  const LeafOwners fast = deal_lanes(32, per_lane, plenty, 0);
  EXPECT_THAT(counts(fast, 2), ElementsAre(15, 17));
  EXPECT_THAT(counts(deal_lanes(32, per_lane, plenty, 0.1), 2), ElementsAre(16, 16));
}

TEST(DealLanes, KeepsToTheMemoryOfEveryRank) {
  for (std::uint64_t round = 0; round < 300; ++round) {
    const int ranks = 2 + static_cast<int>(random_u64(7, round, 0) % 5);
    const std::size_t lanes = index_of(ranks) + random_u64(7, round, 1) % 60;
    const auto most = accumulators_by_rank(even_owners(lanes, ranks), ranks);
    std::vector<double> per_lane;
    for (int r = 0; r < ranks; ++r) {
      per_lane.push_back(0.05 + random_f32(8, round, static_cast<std::uint64_t>(r)));
    }
    const LeafOwners dealt = deal_lanes(lanes, per_lane, most, 0);
    if (dealt.empty()) continue;
    EXPECT_EQ(dealt.size(), lanes);
    EXPECT_TRUE(is_run_per_rank(dealt, ranks));
    const auto needed = accumulators_by_rank(dealt, ranks);
    for (std::size_t r = 0; r < needed.size(); ++r) EXPECT_LE(needed[r], most[r]);
  }
  // With less memory there is another deal.
  const double slow[] = {0.3, 0.1, 0.1, 0.1};
  const std::vector<std::uint32_t> few = {4, 4, 4, 3};
  const auto roomy = deal_lanes(32, slow, std::vector<std::uint32_t>(4, 100), 0);
  const auto tight = deal_lanes(32, slow, few, 0);
  ASSERT_FALSE(tight.empty());
  EXPECT_NE(roomy, tight);
  EXPECT_LE(accumulators_by_rank(tight, 4)[3], 3U);
  EXPECT_LT(counts(tight, 4)[3], counts(roomy, 4)[3]);
  // And with too little there is none.
  EXPECT_TRUE(deal_lanes(32, slow, std::vector<std::uint32_t>(4, 1), 0).empty());
}

TEST(LaneBalance, TheFirstStepsAreAsTheyWere) {
  LaneBalance balance(even_owners(32, 4), 4);
  const double slow[] = {0.1, 0.1, 0.3, 0.1};
  EXPECT_EQ(steps_until_move(balance, slow, 9), -1);  // two are not counted, eight are
  EXPECT_EQ(balance.owners(), even_owners(32, 4));
  EXPECT_EQ(steps_until_move(balance, slow, 1), 1);
  const auto lanes = counts(balance.owners(), 4);
  EXPECT_THAT(lanes[2], Le(4U));
  EXPECT_EQ(std::accumulate(lanes.begin(), lanes.end(), 0U), 32U);
  EXPECT_TRUE(is_run_per_rank(balance.owners(), 4));
}

// A window is a second at least, so that short steps are not judged by their noise.
TEST(LaneBalance, ShortStepsNeedMoreOfThem) {
  LaneBalance balance(even_owners(32, 4), 4);
  const double slow[] = {0.0001, 0.0001, 0.001, 0.0001};  // 8 ms a step
  const int steps = steps_until_move(balance, slow, 1000);
  EXPECT_EQ(steps, 2 + 125);
}

TEST(LaneBalance, NoiseMovesNothing) {
  for (const int ranks : {2, 4, 7}) {
    for (const double noise : {0.02, 0.05, 0.2}) {
      LaneBalance balance(even_owners(32, ranks), ranks);
      for (std::uint64_t step = 0; step < 1000; ++step) {
        std::vector<double> per_lane;
        for (int r = 0; r < ranks; ++r) {
          const double random = random_f32(3, step, static_cast<std::uint64_t>(r)) - 0.5;
          per_lane.push_back(0.1 * (1 + noise * random));
        }
        EXPECT_FALSE(balance.add_step(step_of(balance.owners(), per_lane)))
            << ranks << " ranks, noise " << noise << ", step " << step;
      }
    }
  }
}

// One step that takes a hundred times as long is in one part of a window only.
TEST(LaneBalance, AHiccupMovesNothing) {
  LaneBalance balance(even_owners(32, 4), 4);
  for (int step = 0; step < 500; ++step) {
    const double per_lane[] = {0.1, step % 37 == 0 ? 10.0 : 0.1, 0.1, 0.1};
    EXPECT_FALSE(balance.add_step(step_of(balance.owners(), per_lane))) << step;
  }
}

TEST(LaneBalance, ASlowRankGivesLanesAwayAndGetsThemBack) {
  LaneBalance balance(even_owners(32, 4), 4);
  const double slow[] = {0.1, 0.1, 0.1, 0.3};
  const double equal[] = {0.1, 0.1, 0.1, 0.1};
  EXPECT_EQ(steps_until_move(balance, equal, 100), -1);
  const int until = steps_until_move(balance, slow, 20);
  EXPECT_GT(until, 0);
  // It may have been in the middle of a window and then moves once more, but soon it is settled.
  while (steps_until_move(balance, slow, 40) > 0) {
  }
  const auto lanes = counts(balance.owners(), 4);
  EXPECT_THAT(lanes[3], Le(4U));
  EXPECT_GT(steps_until_move(balance, equal, 30), 0);
  while (steps_until_move(balance, equal, 40) > 0) {
  }
  EXPECT_THAT(counts(balance.owners(), 4), ElementsAre(8, 8, 8, 8));
}

TEST(LaneBalance, NeverMoreOftenThanAWindow) {
  LaneBalance balance(even_owners(40, 4), 4);
  int since = 100;
  for (std::uint64_t step = 0; step < 3000; ++step) {
    std::vector<double> per_lane;
    for (std::uint64_t r = 0; r < 4; ++r) {
      per_lane.push_back(0.1 + random_f32(9, step / 25, r));  // speeds change all the time
    }
    ++since;
    if (!balance.add_step(step_of(balance.owners(), per_lane))) continue;
    EXPECT_GE(since, 10);
    since = 0;
    EXPECT_TRUE(is_run_per_rank(balance.owners(), 4));
    EXPECT_LE(std::ranges::max(accumulators_by_rank(balance.owners(), 4)),
              most_accumulators(even_owners(40, 4), 4));
  }
  EXPECT_LT(since, 3000);  // it has moved
}

// A deal whose partials take longer to send than was thought is taken back, and tried ever more
// rarely.
TEST(LaneBalance, APromiseThatIsNotKeptIsTakenBack) {
  const LeafOwners even = even_owners(32, 4);
  LaneBalance balance(even, 4);
  std::vector<int> moves;
  for (int step = 0; step < 1000; ++step) {
    const double per_lane[] = {0.15, 0.1, 0.1, 0.1};
    // Behind the backward pass the traffic of four partials is hidden; that of more is not.
    const double communication = balance.owners() == even ? 0 : 5;
    if (balance.add_step(step_of(balance.owners(), per_lane, communication))) moves.push_back(step);
  }
  EXPECT_EQ(balance.owners(), even);
  ASSERT_THAT(moves.size(), Ge(6U));
  EXPECT_EQ(moves.size() % 2, 0U);  // there and back
  for (std::size_t i = 0; i < moves.size(); i += 2) EXPECT_EQ(moves[i + 1] - moves[i], 10);
  EXPECT_GT(moves[4] - moves[3], moves[2] - moves[1]);
}

TEST(LaneBalance, TheSameTailsGiveTheSameOwners) {
  LaneBalance one(even_owners(24, 3), 3), other(even_owners(24, 3), 3);
  int moved = 0;
  for (std::uint64_t step = 0; step < 500; ++step) {
    std::vector<double> per_lane;
    for (std::uint64_t r = 0; r < 3; ++r) per_lane.push_back(0.1 + random_f32(4, step / 30, r));
    const auto phases = step_of(one.owners(), per_lane);
    const bool changed = one.add_step(phases);
    EXPECT_EQ(other.add_step(phases), changed);
    EXPECT_EQ(other.owners(), one.owners());
    moved += changed ? 1 : 0;
  }
  EXPECT_GT(moved, 3);
}

// Waiting for others is not slowness, and a clock that stands still says nothing.
TEST(LaneBalance, OnlyComputingCounts) {
  LaneBalance balance(even_owners(16, 2), 2);
  std::vector<PhaseTimes> phases(2);
  for (PhaseTimes& times : phases) times[Phase::kForward] = 1;
  phases[1][Phase::kCommunication] = 50;
  phases[1][Phase::kSave] = 50;
  for (int step = 0; step < 50; ++step) EXPECT_FALSE(balance.add_step(phases));
  LaneBalance still(even_owners(16, 2), 2, {.seconds = 0});
  for (int step = 0; step < 50; ++step) {
    EXPECT_FALSE(still.add_step(std::vector<PhaseTimes>(2)));
  }
}

}  // namespace
}  // namespace lockstep::lane_balance_test

#include "lockstep/net/job/succession.h"

#include <gtest/gtest.h>

namespace lockstep::succession_test {
namespace {

using namespace std::chrono_literals;
using Kind = Succession::Action::Kind;

// A generation of four ranks; `centre` had the role, -1: a launcher.
RosterMessage roster_around(int centre) {
  RosterMessage message;
  message.centre.rank = centre;
  message.timeout = 10s;
  for (int rank = 0; rank < 4; ++rank) {
    Card card;
    card.rank = rank;
    card.world_size = 4;
    card.mesh_address = "10.0.0." + std::to_string(rank) + ":5000";
    card.id[0] = static_cast<std::byte>(rank + 1);
    message.roster.push_back(card);
  }
  return message;
}

struct SuccessionTest : ::testing::Test {
  Succession::Time now = Succession::Time{} + 1h;
};

TEST_F(SuccessionTest, TheFirstRankServesAtOnceWhenALauncherIsGone) {
  const RosterMessage last = roster_around(-1);
  Succession search(last, 0, "", now);
  const auto action = search.next(true, now);
  EXPECT_EQ(action.kind, Kind::kServe);
  EXPECT_TRUE(action.lost.empty());
}

TEST_F(SuccessionTest, TheNextRankServesWhenTheFirstWasTheCentre) {
  const RosterMessage last = roster_around(0);
  Succession search(last, 1, "", now);
  const auto action = search.next(true, now);
  EXPECT_EQ(action.kind, Kind::kServe);
  EXPECT_EQ(action.lost, std::vector{0});
}

TEST_F(SuccessionTest, RanksInFrontAreAskedFirst) {
  const RosterMessage last = roster_around(0);
  Succession search(last, 3, "", now);
  for (const int rank : {1, 2}) {
    const auto call = search.next(true, now);
    ASSERT_EQ(call.kind, Kind::kCall);
    EXPECT_EQ(call.address, last.roster[static_cast<std::size_t>(rank)].mesh_address);
    EXPECT_EQ(call.until, now + 10s);
    EXPECT_EQ(call.whom, last.roster[static_cast<std::size_t>(rank)].id);  // and nobody else
    search.unreachable(now);
  }
  const auto action = search.next(true, now);
  EXPECT_EQ(action.kind, Kind::kServe);
  EXPECT_EQ(action.lost, (std::vector{0, 1, 2}));
}

TEST_F(SuccessionTest, WhoIsThereButDoesNotKnowTheCentreIsAskedAgain) {
  const RosterMessage last = roster_around(-1);
  Succession search(last, 2, "", now);
  ASSERT_EQ(search.next(true, now).kind, Kind::kCall);
  search.redirected("", now);
  const auto wait = search.next(true, now);
  ASSERT_EQ(wait.kind, Kind::kWait);
  EXPECT_LT(wait.until, now + 1s);
  EXPECT_EQ(search.next(true, wait.until).address, last.roster[0].mesh_address);
}

TEST_F(SuccessionTest, ARankThatIsInTouchWithTheCentreSaysWhereItIs) {
  const RosterMessage last = roster_around(-1);
  Succession search(last, 2, "", now);
  ASSERT_EQ(search.next(true, now).kind, Kind::kCall);
  search.redirected("10.0.1.1:4000", now);
  now += 1s;
  const auto call = search.next(true, now);
  ASSERT_EQ(call.kind, Kind::kCall);
  EXPECT_EQ(call.address, "10.0.1.1:4000");
  EXPECT_FALSE(call.whom);          // whoever the centre is
  EXPECT_LE(call.until, now + 2s);  // or it has gone meanwhile; it is not waited for long
  // It cannot be reached. The rank that knew it is asked again: by now it may have the role.
  search.unreachable(now);
  now += 1s;
  EXPECT_EQ(search.next(true, now).address, last.roster[0].mesh_address);
}

TEST_F(SuccessionTest, WhoStoodStillAsksAllAndNeverServes) {
  const RosterMessage last = roster_around(0);
  Succession search(last, 1, "", now);
  for (const int rank : {0, 2, 3}) {  // the centre, too, which may live
    const auto call = search.next(false, now);
    ASSERT_EQ(call.kind, Kind::kCall);
    EXPECT_EQ(call.address, last.roster[static_cast<std::size_t>(rank)].mesh_address);
    search.unreachable(now);
  }
  EXPECT_EQ(search.next(false, now).kind, Kind::kGiveUp);
}

TEST_F(SuccessionTest, WhoStandsStillWhileItSearchesDoesNotServeEither) {
  const RosterMessage last = roster_around(-1);
  Succession search(last, 1, "", now);
  ASSERT_EQ(search.next(true, now).kind, Kind::kCall);
  search.unreachable(now);
  const auto call = search.next(false, now);
  ASSERT_EQ(call.kind, Kind::kCall);
  EXPECT_EQ(call.address, last.roster[2].mesh_address);
}

TEST_F(SuccessionTest, ACentreThatNeverMovesIsCalledUntilPatienceEnds) {
  const RosterMessage last = roster_around(-1);
  Succession search(last, 0, "10.0.1.1:4000", now);
  const auto end = now + 100s;
  int calls = 0;
  for (;;) {
    const auto action = search.next(true, now);
    if (action.kind == Kind::kGiveUp) break;
    if (action.kind == Kind::kCall) {
      ++calls;
      EXPECT_EQ(action.address, "10.0.1.1:4000");
      now += 1s;
      search.unreachable(now);
    } else {
      ASSERT_EQ(action.kind, Kind::kWait);
      now = action.until;
    }
  }
  EXPECT_GE(now, end);
  EXPECT_GT(calls, 90);
}

}  // namespace
}  // namespace lockstep::succession_test

#include "lockstep/run/roster_news.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::roster_news_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Kind = Job::Departure::Kind;

const LeafOwners kOwners = {0, 0, 1, 1, 2, 2};

RosterNews::GoesOn after_step(std::int64_t step) {
  return {.steps = 10,
          .lost_at = step,
          .step = step,
          .after_loss = true,
          .lanes = {3, 3},
          .members = {"rank 0", "rank 1"},
          .seconds = 0.5};
}

TEST(RosterNews, AreKeptUntilTheyAreTold) {
  RosterNews news;
  news.note({{2, Kind::kDied, "rank 2 (a, pid 3)", "was killed"}}, 1, kOwners, {});
  news.note({{1, Kind::kLeft, "rank 1 (a, pid 2)", ""}}, 2, {}, {"rank 1 (b, pid 7)"});
  news.note({{-1, Kind::kFailed, "rank 3 (a, pid 4)", "no memory"}}, 3, {}, {"rank 2 (b, pid 8)"});
  const std::vector<RunEvent> events = news.take_events(after_step(4));
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0].kind, RunEvent::Kind::kLost);
  EXPECT_THAT(events[0].who, ElementsAre("rank 2 (a, pid 3)", "rank 3 (a, pid 4)"));
  EXPECT_EQ(events[0].how, "was killed");
  EXPECT_EQ(events[1].kind, RunEvent::Kind::kJoined);
  EXPECT_THAT(events[1].who, ElementsAre("rank 1 (b, pid 7)", "rank 2 (b, pid 8)"));
  EXPECT_EQ(events[2].kind, RunEvent::Kind::kLeft);
  for (const RunEvent& event : events) {
    EXPECT_EQ(event.step, 5);
    EXPECT_THAT(event.lanes, ElementsAre(3u, 3u));
    EXPECT_THAT(event.members, ElementsAre("rank 0", "rank 1"));
    EXPECT_EQ(event.seconds, 0.5);
  }
  EXPECT_THAT(news.take_events(after_step(4)), IsEmpty());
}

TEST(RosterNews, AStepIsComputedAgainUnlessItIsDone) {
  const auto again = [](const RosterNews::GoesOn& now) {
    RosterNews news;
    news.note({{2, Kind::kExpelled, "rank 2", "silent"}}, 1, kOwners, {});
    const std::vector<RunEvent> events = news.take_events(now);
    EXPECT_EQ(events[0].kind, RunEvent::Kind::kExpelled);
    return events[0].again;
  };
  EXPECT_TRUE(again(after_step(4)));
  EXPECT_FALSE(again(after_step(10)));  // there is none any more
  RosterNews::GoesOn now = after_step(4);
  now.step = 5;  // by another worker
  EXPECT_FALSE(again(now));
  now = after_step(4);
  now.after_loss = false;
  EXPECT_FALSE(again(now));
}

TEST(RosterNews, WhoComesTwiceBeforeItIsToldHasComeOnce) {
  RosterNews news;
  news.note({}, 1, kOwners, {"rank 2 (b, pid 8)", "rank 3 (b, pid 9)"});
  news.note({}, 2, {}, {"rank 1 (b, pid 8)"});
  const std::vector<RunEvent> events = news.take_events(after_step(4));
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, RunEvent::Kind::kJoined);
  EXPECT_THAT(events[0].who, ElementsAre("rank 3 (b, pid 9)", "rank 1 (b, pid 8)"));
}

TEST(RosterNews, AWayBackNamesTheStepThatWasUnderWay) {
  RosterNews news;
  news.note({{0, Kind::kDied, "rank 0", "was killed"}}, 1, kOwners, {});
  RosterNews::GoesOn now = after_step(7);
  now.step = 4;
  now.went_back = true;
  const std::vector<RunEvent> events = news.take_events(now);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_FALSE(events[0].again);
  EXPECT_EQ(events[1].kind, RunEvent::Kind::kWentBack);
  EXPECT_EQ(events[1].step, 8);
  EXPECT_EQ(events[1].back_to, 4);
}

TEST(RosterNews, LanesCountOfWhoFailedByItself) {
  RosterNews news;
  KillingLanes killing;
  for (std::uint32_t generation = 1; generation <= KillingLanes::kTimes; ++generation) {
    EXPECT_FALSE(killing.finding());
    news.note({{0, Kind::kDied, "rank 0", "was killed"}, {1, Kind::kFailed, "rank 1", "SIGSEGV"}},
              generation, kOwners, {});
    news.note({{1, Kind::kFailed, "rank 1", "SIGSEGV"}}, generation, {}, {});  // none were dealt
    news.count_failures(5, killing);
    news.count_failures(5, killing);  // a generation that ended early: it is one time all the same
    news.take_events(after_step(4));
  }
  const auto finding = killing.finding();
  ASSERT_TRUE(finding);
  EXPECT_EQ(finding->step, 5);
  EXPECT_THAT(finding->lanes, ElementsAre(2u, 3u));
}

}  // namespace
}  // namespace lockstep::roster_news_test

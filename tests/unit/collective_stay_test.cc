#include "lockstep/comm/collective_stay.h"

#include <gtest/gtest.h>

namespace lockstep::collective_stay_test {
namespace {

using namespace std::chrono_literals;

struct Rank {
  FlightRecorder recorder;
  FlightTrack& track = *recorder.take_track(7);
  RoughDeadline patience{10s};
  MeshFrame stamp;

  Rank() {
    recorder.set_place(0, 2, 1, 1);
    stamp.sequence = 1;
  }
  CollectiveStay collective(std::optional<Deadline> deadline = std::nullopt) {
    return CollectiveStay(recorder, track, stamp, patience, deadline);
  }
};

// The clock it is made of moves every few milliseconds.
TEST(RoughDeadlineTest, IsMadeAnewOnceAMillisecondHasPassed) {
  RoughDeadline patience(10s);
  constexpr std::uint64_t kNow = 1'000'000;
  const Deadline first = patience.at(kNow, 1);
  const Deadline limit = Deadline::after(10s);
  while (Deadline::roughly_after(10s).time() == first.time() && !limit.expired()) continue;
  EXPECT_EQ(patience.at(kNow + 1, 1).time(), first.time());
  EXPECT_EQ(patience.at(kNow + 1000, 1000).time(), first.time());
  EXPECT_GT(patience.at(kNow + 2, 1).time(), first.time());
}

TEST(CollectiveStayTest, IsUnderWayFromEnterToItsEnd) {
  Rank rank;
  {
    CollectiveStay stay = rank.collective();
    EXPECT_EQ(rank.track.ring.count(), 0U);
    stay.enter();
    stay.enter();
    ASSERT_EQ(rank.track.ring.count(), 1U);
    EXPECT_EQ(rank.track.ring.at(0)->end, 0U);
    stay.succeeded();
  }
  EXPECT_GT(rank.track.ring.at(0)->end, 0U);
  EXPECT_FALSE(unpack_end(rank.track.ring.at(0)->note).failed);
}

TEST(CollectiveStayTest, OneThatFailsBeforeItIsEnteredIsRecorded) {
  Rank rank;
  { CollectiveStay stay = rank.collective(); }
  ASSERT_EQ(rank.track.ring.count(), 1U);
  EXPECT_TRUE(unpack_end(rank.track.ring.at(0)->note).failed);
}

TEST(CollectiveStayTest, OneThatNeedsNobodyIsNot) {
  Rank rank;
  {
    CollectiveStay stay = rank.collective();
    stay.succeeded();
  }
  EXPECT_EQ(rank.track.ring.count(), 0U);
}

TEST(CollectiveStayTest, EndsWithTheLastLookInVain) {
  Rank rank;
  if (!rank.recorder.reads_counter()) GTEST_SKIP() << "needs the processor's counter";
  std::uint64_t after = 0;
  {
    CollectiveStay stay = rank.collective();
    stay.enter();
    stay.watch();
    stay.looked();
    after = rank.recorder.ticks();
    while (rank.recorder.ticks() - after < 100'000) continue;
    stay.succeeded();
  }
  const auto record = rank.track.ring.at(0);
  EXPECT_GT(record->end, record->begin);
  EXPECT_LE(record->end, after);
}

TEST(CollectiveStayTest, EndsLaterThanItsLooksWhenItGoesOn) {
  Rank rank;
  std::uint64_t after = 0;
  {
    CollectiveStay stay = rank.collective();
    stay.enter();
    stay.watch();
    stay.looked();
    after = rank.recorder.ticks();
    stay.goes_on();
    stay.succeeded();
  }
  EXPECT_GE(rank.track.ring.at(0)->end, after);
}

TEST(CollectiveStayTest, HasItsOwnDeadlineOrThatOfTheJob) {
  Rank rank;
  const Deadline own = Deadline::after(1h);
  CollectiveStay with = rank.collective(own);
  EXPECT_EQ(with.enter().time(), own.time());
  with.succeeded();
  CollectiveStay without = rank.collective();
  const auto left = without.enter().remaining();
  EXPECT_GT(left, 9s);
  EXPECT_LT(left, 11s);
  without.succeeded();
}

}  // namespace
}  // namespace lockstep::collective_stay_test

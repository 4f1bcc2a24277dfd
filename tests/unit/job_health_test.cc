#include "lockstep/net/job/job_health.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/build_kind.h"

namespace lockstep::job_health_test {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;

constexpr auto kTimeout = 10s;
const JobHealth::Time kStart{100s};

std::vector<std::string> names(int count) {
  std::vector<std::string> names;
  for (int rank = 0; rank < count; ++rank) {
    names.push_back("rank " + std::to_string(rank) + " (node" + std::to_string(rank) + ")");
  }
  return names;
}

Progress at(std::uint64_t sequence, bool inside = true, std::string what = "all_reduce",
            std::uint32_t group = 0) {
  return {group, sequence, inside, std::move(what)};
}

Progress waiting_at(std::uint64_t sequence, int waits_for) {
  return {0, sequence, true, "all_reduce", waits_for};
}

Report accuse(int rank, ErrorCode code = ErrorCode::kChannelClosed) {
  return {Error(code, "connection closed", rank), {}};
}

class JobHealthTest : public ::testing::Test {
 protected:
  // Lets time pass, all ranks but the silent ones alive.
  void pass(JobHealth::Clock::duration duration, std::vector<int> silent = {}) {
    const auto end = now + duration;
    while (now < end) {
      now = std::min(end, std::min(health.wake_at(), now + kTimeout / 5));
      for (int rank = 0; rank < 4; ++rank) {
        if (std::ranges::find(silent, rank) == silent.end()) health.heartbeat(rank, {}, now);
      }
      health.tick(now);
    }
  }
  void expect_verdict(ErrorCode code, int rank, const std::string& text) {
    ASSERT_TRUE(health.verdict());
    EXPECT_EQ(health.verdict()->code(), code) << health.verdict()->what();
    EXPECT_EQ(health.verdict()->rank(), rank) << health.verdict()->what();
    EXPECT_THAT(health.verdict()->what(), HasSubstr(text));
  }

  JobHealth::Time now = kStart;
  JobHealth health{names(4), kTimeout, kStart};
};

TEST_F(JobHealthTest, NothingHappensWhileAllAreAlive) {
  pass(1000s);
  EXPECT_FALSE(health.verdict());
}

TEST_F(JobHealthTest, AClosedConnectionIsADeathAtOnce) {
  health.closed(2, now);
  expect_verdict(ErrorCode::kPeerLost, 2, "rank 2 (node2) died");
}

TEST_F(JobHealthTest, OfSimultaneousDeathsTheFirstWins) {
  health.closed(2, now);
  health.closed(1, now);
  expect_verdict(ErrorCode::kPeerLost, 2, "rank 2 (node2) died");
}

TEST_F(JobHealthTest, SilenceForTheTimeoutIsADeath) {
  pass(kTimeout - 1ms, {3});
  EXPECT_FALSE(health.verdict());
  pass(1ms, {3});
  expect_verdict(ErrorCode::kPeerLost, 3, "rank 3 (node3) has been silent for 10s");
}

TEST_F(JobHealthTest, ACentreThatWasStoppedBlamesNobody) {
  pass(1s);
  now += 10 * kTimeout;
  health.tick(now);
  EXPECT_FALSE(health.verdict());
  pass(kTimeout, {1});
  expect_verdict(ErrorCode::kPeerLost, 1, "silent");
}

TEST_F(JobHealthTest, ACentreThatWasStoppedBelievesThoseWhoGaveItUp) {
  // Rank 0 is the centre; while it was stopped the others reported it and went.
  now += 10 * kTimeout;
  for (const int rank : {1, 2, 3}) {
    health.report(rank, {Error(ErrorCode::kPeerLost, "has been silent", 0), {}}, now);
    health.closed(rank, now);
  }
  health.tick(now);
  pass(300ms, {1, 2, 3});
  expect_verdict(ErrorCode::kPeerLost, 0, "seen by rank 1 (node1)");
}

TEST_F(JobHealthTest, AnAccusationWaitsForBetterEvidence) {
  health.report(0, accuse(1), now);
  EXPECT_FALSE(health.verdict());
  EXPECT_LE(health.wake_at(), now + 300ms);
  pass(300ms);
  expect_verdict(ErrorCode::kPeerLost, 1, "rank 1 (node1) is out of reach: connection closed");
  expect_verdict(ErrorCode::kPeerLost, 1, "seen by rank 0 (node0)");
}

TEST_F(JobHealthTest, ADeathExplainsAnAccusation) {
  health.report(0, accuse(1), now);
  health.closed(2, now + 50ms);
  expect_verdict(ErrorCode::kPeerLost, 2, "rank 2 (node2) died");
}

TEST_F(JobHealthTest, ACascadeIsFollowedToItsRoot) {
  health.report(3, accuse(0), now);
  health.report(0, accuse(1), now + 1ms);
  health.report(1, accuse(2), now + 2ms);
  pass(300ms);
  expect_verdict(ErrorCode::kPeerLost, 2, "seen by rank 1 (node1)");
}

TEST_F(JobHealthTest, TheAccusedsOwnFailureIsTheCause) {
  health.report(0, accuse(1), now);
  health.report(1, {Error(ErrorCode::kNonFinite, "NaN in bucket 3"), {}}, now + 100ms);
  expect_verdict(ErrorCode::kNonFinite, 1, "rank 1 (node1): NaN in bucket 3");
}

TEST_F(JobHealthTest, ACircleOfAccusationsEndsWithTheFirst) {
  health.report(1, accuse(2), now);
  health.report(2, accuse(1), now);
  pass(300ms);
  expect_verdict(ErrorCode::kPeerLost, 2, "seen by rank 1 (node1)");
}

TEST_F(JobHealthTest, ALongCircleBehindTheFirstEndsToo) {
  health.report(0, accuse(1), now);
  health.report(1, accuse(2), now);
  health.report(2, accuse(3), now);
  health.report(3, accuse(1), now);
  pass(300ms);
  expect_verdict(ErrorCode::kPeerLost, 1, "seen by rank 0 (node0)");
}

TEST_F(JobHealthTest, TheGraceIsATenthOfAShortTimeout) {
  JobHealth quick(names(2), 200ms, now);
  quick.report(0, accuse(1), now);
  quick.tick(now + 19ms);
  EXPECT_FALSE(quick.verdict());
  quick.tick(now + 20ms);
  EXPECT_TRUE(quick.verdict());
}

TEST_F(JobHealthTest, AnAccusationOfNobodyIsTheReportersOwn) {
  health.report(1, {Error(ErrorCode::kIo, "disk full"), {}}, now);
  expect_verdict(ErrorCode::kIo, 1, "rank 1 (node1): disk full");
}

TEST_F(JobHealthTest, AnAccusationOutOfRangeIsTheReportersOwn) {
  health.report(1, accuse(77), now);
  expect_verdict(ErrorCode::kChannelClosed, 1, "rank 1 (node1)");
}

TEST_F(JobHealthTest, ACorruptFrameIsFinalAtOnceAndNamesBoth) {
  health.report(1, {Error(ErrorCode::kUnexpectedMessage, "bad checksum", 3), {}}, now);
  expect_verdict(ErrorCode::kUnexpectedMessage, 3,
                 "rank 3 (node3): bad checksum (seen by rank 1 (node1))");
}

TEST_F(JobHealthTest, WhoIsToBlameIsNamedOnce) {
  health.report(1, {Error(ErrorCode::kUnexpectedMessage, "rank 3 (node3): bad segment", 3), {}},
                now);
  expect_verdict(ErrorCode::kUnexpectedMessage, 3,
                 "unexpected message: rank 3 (node3): bad segment (seen by rank 1 (node1))");
}

TEST_F(JobHealthTest, AbortIsFinalAtOnce) {
  health.report(0, accuse(1), now);
  health.report(1, {Error(ErrorCode::kAborted, "user asked", 1), {}}, now);
  expect_verdict(ErrorCode::kAborted, 1, "rank 1 (node1) aborted: user asked");
}

TEST_F(JobHealthTest, LeavingInOrderIsNoDeath) {
  health.goodbye(2, {}, now);
  health.closed(2, now);
  pass(5 * kTimeout, {2});
  EXPECT_FALSE(health.verdict());
}

TEST_F(JobHealthTest, WaitingForOneThatLeftNamesIt) {
  health.goodbye(2, {}, now);
  health.report(0, accuse(2), now);
  expect_verdict(ErrorCode::kPeerLost, 2, "rank 2 (node2) has left the job");
}

TEST_F(JobHealthTest, LeavingDuringTheGraceNamesIt) {
  health.report(0, accuse(2), now);
  health.goodbye(2, {}, now + 1ms);
  pass(300ms);
  expect_verdict(ErrorCode::kPeerLost, 2, "rank 2 (node2) has left the job");
}

TEST_F(JobHealthTest, BeingInsideACollectiveThatALeaverNeverEnteredIsFatal) {
  health.heartbeat(0, {at(18)}, now);
  health.goodbye(2, {at(17, false)}, now);
  expect_verdict(ErrorCode::kPeerLost, 2, "rank 2 (node2) has left the job after collective 17");
}

TEST_F(JobHealthTest, WaitingForALeaverInAGroupThatItNeverEnteredIsFatal) {
  health.goodbye(2, {at(17, false)}, now);
  health.heartbeat(0, {Progress{7, 1, true, "message", 3}}, now);
  EXPECT_FALSE(health.verdict()) << "it waits for another one";
  health.heartbeat(0, {Progress{7, 1, true, "message", 2}}, now);
  expect_verdict(ErrorCode::kPeerLost, 2, "rank 2 (node2) has left the job; rank 0 (node0) waits");
}

TEST_F(JobHealthTest, WhoLeavesWhileSomebodyWaitsForItIsNamed) {
  health.heartbeat(0, {Progress{7, 1, true, "message", 2}}, now);
  EXPECT_FALSE(health.verdict());
  health.goodbye(2, {at(17, false)}, now);
  pass(100ms, {0, 1, 2, 3});
  EXPECT_TRUE(health.take_ping());
  health.heartbeat(0, {Progress{7, 1, true, "message", 2}}, now);
  expect_verdict(ErrorCode::kPeerLost, 2, "rank 2 (node2) has left the job; rank 0 (node0) waits");
}

TEST_F(JobHealthTest, LeavingAfterTheLastCollectiveIsFine) {
  health.goodbye(2, {at(18, false)}, now);
  health.heartbeat(0, {at(18)}, now);
  health.heartbeat(1, {at(19, true, "all_reduce", 7)}, now);  // a group rank 2 was not part of
  EXPECT_FALSE(health.verdict());
}

// Where ranks have no connections with each other nobody sees that one has closed.
TEST_F(JobHealthTest, WhoeverIsLeftIsSoonAskedWhetherItWaitsForALeaver) {
  health.goodbye(1, {at(17, false)}, now);
  health.goodbye(2, {at(17, false)}, now + 50ms);
  EXPECT_FALSE(health.take_ping());
  EXPECT_EQ(health.wake_at(), now + 100ms);
  health.tick(now + 100ms);
  EXPECT_TRUE(health.take_ping());
  EXPECT_GT(health.wake_at(), now + 1s) << "once for both";
  health.heartbeat(0, {at(18)}, now + 110ms);
  expect_verdict(ErrorCode::kPeerLost, 1, "rank 1 (node1) has left the job after collective 17");
}

TEST_F(JobHealthTest, OfSeveralThatLeftTheFurthestBehindIsNamed) {
  health.goodbye(1, {at(17, false)}, now);
  health.goodbye(2, {at(16, false)}, now);
  health.heartbeat(0, {at(17), at(16, false)}, now);
  expect_verdict(ErrorCode::kPeerLost, 2, "rank 2 (node2) has left the job after collective 16");
}

// An event's cost does not grow with the ranks: 16 million comparisons here would take seconds.
TEST(JobHealthOfMany, FourThousandRanksSpeakAndLeaveInNoTime) {
  constexpr int kRanks = 4096;
  JobHealth health(names(kRanks), kTimeout, kStart);
  std::vector<Progress> progress;
  for (std::uint64_t sequence = 8; sequence > 0; --sequence)
    progress.push_back(at(sequence, false));
  const auto begin = std::chrono::steady_clock::now();
  auto now = kStart;
  for (int round = 0; round < 5; ++round) {
    now += kTimeout / 5;
    for (int rank = 0; rank < kRanks; ++rank) {
      health.heartbeat(rank, progress, now);
      health.tick(now);
    }
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    health.goodbye(rank, progress, now);
    health.closed(rank, now);
    health.tick(now);
  }
  EXPECT_FALSE(health.verdict());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 1s + test::kSlack);
}

TEST_F(JobHealthTest, TheSameCollectiveDescribedDifferentlyIsAMismatch) {
  health.heartbeat(0, {at(17, true, "all_reduce sum f32 x 101")}, now);
  EXPECT_FALSE(health.take_ping());
  health.heartbeat(2, {at(17, true, "all_reduce sum f32 x 100")}, now);
  EXPECT_TRUE(health.take_ping());
  now += 500ms;
  health.tick(now);
  expect_verdict(ErrorCode::kCollectiveMismatch, 2,
                 "rank 2 (node2) called all_reduce sum f32 x 100, rank 0 (node0) called all_reduce "
                 "sum f32 x 101, as collective 17");
}

TEST_F(JobHealthTest, AMismatchBlamesTheOddOneOutOnceAllHaveAnswered) {
  health.heartbeat(0, {at(5, true, "b")}, now);
  health.heartbeat(1, {at(5, true, "a")}, now);
  now += 1ms;
  for (const int rank : {0, 1, 2, 3}) {
    health.tick(now);
    EXPECT_FALSE(health.verdict());
    health.heartbeat(rank, {at(5, true, rank == 0 ? "b" : "a")}, now);
  }
  health.tick(now);
  expect_verdict(ErrorCode::kCollectiveMismatch, 0,
                 "rank 0 (node0) called b, rank 1 (node1) called a");
}

TEST_F(JobHealthTest, WhoAnswersBeforeItEntersIsAskedAgain) {
  health.heartbeat(2, {at(5, true, "a")}, now);
  health.heartbeat(1, {at(5, true, "b")}, now);
  EXPECT_TRUE(health.take_ping());
  now += 1ms;
  for (const int rank : {0, 3}) health.heartbeat(rank, {at(4, false)}, now);
  health.heartbeat(1, {at(5, true, "b")}, now);
  health.heartbeat(2, {at(5, true, "a")}, now);
  health.tick(now);
  EXPECT_FALSE(health.verdict());  // one against one: ranks 0 and 3 may tell
  EXPECT_LE(health.wake_at(), now + 20ms);
  now = health.wake_at();
  health.tick(now);
  EXPECT_TRUE(health.take_ping());
  now += 1ms;
  health.heartbeat(1, {at(5, true, "b")}, now);
  for (const int rank : {0, 2, 3}) health.heartbeat(rank, {at(5, true, "a")}, now);
  health.tick(now);
  expect_verdict(ErrorCode::kCollectiveMismatch, 1,
                 "rank 1 (node1) called b, rank 0 (node0) called a");
}

TEST_F(JobHealthTest, AMismatchIsNotForgottenWhenTheRanksMoveOn) {
  health.heartbeat(0, {at(5, true, "b")}, now);
  health.heartbeat(1, {at(5, true, "a")}, now);
  now += 1ms;
  for (const int rank : {0, 1, 2, 3}) health.heartbeat(rank, {at(6)}, now);
  health.tick(now);
  expect_verdict(ErrorCode::kCollectiveMismatch, 1, "as collective 5");
}

TEST_F(JobHealthTest, AMismatchIsFoundAmongTheCollectivesBefore) {
  const auto before = [](const std::string& what) { return at(5, false, what); };
  health.heartbeat(0, {at(7), at(6, false), before("scatter, root 0")}, now);
  health.heartbeat(1, {at(5, true, "scatter, root 2")}, now);
  now += 1ms;
  health.heartbeat(1, {at(5, true, "scatter, root 2")}, now);
  for (const int rank : {0, 2, 3}) {
    health.heartbeat(rank, {at(7), at(6, false), before("scatter, root 0")}, now);
  }
  health.tick(now);
  expect_verdict(ErrorCode::kCollectiveMismatch, 1,
                 "rank 1 (node1) called scatter, root 2, rank 0 (node0) called scatter, root 0, as "
                 "collective 5");
}

TEST_F(JobHealthTest, AReportedMismatchIsExplainedByAll) {
  health.report(0, {Error(ErrorCode::kCollectiveMismatch, "seen", 2), {at(5, true, "a")}}, now);
  EXPECT_TRUE(health.take_ping());
  EXPECT_FALSE(health.verdict());
  now += 1ms;
  for (const int rank : {0, 1, 2, 3}) {
    health.heartbeat(rank, {at(5, true, rank == 3 ? "b" : "a")}, now);
  }
  health.tick(now);
  expect_verdict(ErrorCode::kCollectiveMismatch, 3, "called b");
}

TEST_F(JobHealthTest, AReportedMismatchThatNobodyCanExplainStands) {
  health.report(0, {Error(ErrorCode::kCollectiveMismatch, "a message of its own", 2), {}}, now);
  now += 500ms;
  health.tick(now);
  expect_verdict(ErrorCode::kCollectiveMismatch, 2, "a message of its own");
}

TEST_F(JobHealthTest, AMismatchExplainsATimeout) {
  health.report(0, {Error(ErrorCode::kTimeout, "late", 1), {at(5, true, "b")}}, now);
  health.heartbeat(1, {at(5, true, "a")}, now);
  now += 500ms;
  health.tick(now);
  expect_verdict(ErrorCode::kCollectiveMismatch, 1, "as collective 5");
}

TEST_F(JobHealthTest, OtherPlacesAndGroupsAreNoMismatch) {
  health.heartbeat(0, {at(17, true, "a"), at(3, true, "x", 9)}, now);
  health.heartbeat(1, {at(16, true, "b"), at(17, true, "y", 9)}, now);
  health.heartbeat(2, {at(0, false, "never mind")}, now);
  health.heartbeat(3, {at(0, false, "")}, now);
  EXPECT_FALSE(health.verdict());
}

TEST_F(JobHealthTest, ATimeoutAsksAroundAndNamesTheAbsent) {
  for (const int rank : {1, 2, 3}) health.heartbeat(rank, {at(16, false)}, now);
  health.report(0, {Error(ErrorCode::kTimeout, "waiting for rank 1", 1), {at(17)}}, now);
  EXPECT_TRUE(health.take_ping());
  EXPECT_FALSE(health.take_ping());
  health.tick(now + 1ms);
  EXPECT_FALSE(health.verdict());
  for (const int rank : {0, 1, 2}) health.heartbeat(rank, {at(17)}, now + 2ms);
  health.tick(now + 2ms);
  EXPECT_FALSE(health.verdict());
  health.heartbeat(3, {at(16, false)}, now + 3ms);
  health.tick(now + 3ms);
  expect_verdict(ErrorCode::kTimeout, 3,
                 "rank 3 (node3) has not entered collective 17 (all_reduce); last seen after "
                 "collective 16");
}

TEST_F(JobHealthTest, ATimeoutDoesNotWaitLongForAnswers) {
  health.heartbeat(3, {at(2, false)}, now);
  health.report(0, {Error(ErrorCode::kTimeout, "late", 3), {at(17)}}, now);
  EXPECT_LE(health.wake_at(), now + 500ms);
  now += 500ms;
  health.tick(now);
  expect_verdict(ErrorCode::kTimeout, 3, "last seen after collective 2");
}

TEST_F(JobHealthTest, ATimeoutNamesSeveralButOnlyTheFurthestBehind) {
  health.heartbeat(1, {at(16, false)}, now);
  health.heartbeat(2, {at(15, false)}, now);
  health.heartbeat(3, {at(15, false)}, now);
  health.report(0, {Error(ErrorCode::kTimeout, "late", 1), {at(17)}}, now);
  health.settle();
  expect_verdict(ErrorCode::kTimeout, 2, "rank 2 (node2), rank 3 (node3) have not entered");
}

// Rank 0 has all that it needs of collective 16, and goes on; the others have not.
TEST_F(JobHealthTest, ATimeoutSparesWhoIsHeldUpInTheCollectiveBefore) {
  health.heartbeat(1, {waiting_at(16, 3)}, now);
  health.heartbeat(2, {waiting_at(16, 1)}, now);
  health.heartbeat(3, {at(16)}, now);
  health.report(0, {Error(ErrorCode::kTimeout, "late", 1), {waiting_at(17, 1)}}, now);
  health.settle();
  expect_verdict(ErrorCode::kTimeout, 3,
                 "rank 3 (node3) has not entered collective 17 (all_reduce); last seen in "
                 "collective 16");
}

TEST_F(JobHealthTest, ATimeoutWithAllInsideNamesTheOneThatWaitsForNobody) {
  health.heartbeat(1, {waiting_at(17, 3)}, now);
  health.heartbeat(2, {waiting_at(17, 0)}, now);
  health.heartbeat(3, {at(17)}, now);
  health.report(0, {Error(ErrorCode::kTimeout, "nothing came", 1), {waiting_at(17, 1)}}, now);
  health.settle();
  expect_verdict(ErrorCode::kTimeout, 3, "rank 3 (node3) does not go on in collective 17");
}

TEST_F(JobHealthTest, ATimeoutLeadsToTheRankThatHasNoCommunicatorYet) {
  health.heartbeat(1, {waiting_at(1, 3)}, now);
  health.heartbeat(2, {waiting_at(1, 1)}, now);
  health.report(0, {Error(ErrorCode::kTimeout, "nothing came", 2), {waiting_at(1, 2)}}, now);
  health.settle();
  expect_verdict(ErrorCode::kTimeout, 3, "rank 3 (node3) has not entered collective 1");
}

TEST_F(JobHealthTest, ATimeoutInACircleKeepsTheReportersView) {
  health.heartbeat(1, {waiting_at(17, 2)}, now);
  health.heartbeat(2, {waiting_at(17, 0)}, now);
  health.report(0, {Error(ErrorCode::kTimeout, "nothing came", 1), {waiting_at(17, 1)}}, now);
  health.settle();
  expect_verdict(ErrorCode::kTimeout, 1, "rank 1 (node1): nothing came (seen by rank 0 (node0))");
}

TEST_F(JobHealthTest, ATimeoutNamesTheRankThatNeverUsedTheGroup) {
  health.report(0, {Error(ErrorCode::kTimeout, "nothing came", 2), {at(1)}}, now);
  health.settle();
  expect_verdict(ErrorCode::kTimeout, 2, "rank 2 (node2) has not entered collective 1");
}

// Alive, as its heartbeats say, but it did not send.
TEST_F(JobHealthTest, ATimeoutOutsideCollectivesIsAnAccusation) {
  health.report(0, accuse(3, ErrorCode::kTimeout), now);
  EXPECT_FALSE(health.take_ping());
  pass(300ms);
  expect_verdict(ErrorCode::kTimeout, 3, "rank 3 (node3): connection closed (seen by rank 0");
}

TEST_F(JobHealthTest, NothingChangesAVerdict) {
  health.report(1, {Error(ErrorCode::kIo, "disk full"), {}}, now);
  health.closed(0, now);
  health.report(2, {Error(ErrorCode::kAborted, "late"), {}}, now);
  pass(5 * kTimeout, {0, 1, 2, 3});
  expect_verdict(ErrorCode::kIo, 1, "disk full");
  EXPECT_EQ(health.wake_at(), JobHealth::Time::max());
}

}  // namespace
}  // namespace lockstep::job_health_test

#include "tests/support/job_simulator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/build_kind.h"

namespace lockstep::job_simulator_test {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;
using test::JobSimulator;
using test::kSanitizers;

// A job of the size that all members have joined.
struct Formed : JobSimulator {
  explicit Formed(int members, std::uint64_t seed = 1, bool gives_ranks = false)
      : JobSimulator({.members = members, .seed = seed, .gives_ranks = gives_ranks}) {
    start_all();
    EXPECT_TRUE(run_until([this] { return all_formed(); }, 1s));
  }

  // All that run end with one failure, not later than `longest` from now.
  Error ends(Clock::duration longest) {
    EXPECT_TRUE(run_until([this] { return common_failure().has_value(); }, longest));
    return common_failure().value_or(Error(ErrorCode::kInvalidArgument, "no common failure"));
  }
};

class Seeds : public ::testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(JobSimulator, Seeds, ::testing::Range<std::uint64_t>(1, 21));

TEST_P(Seeds, FormsAndLivesOn) {
  Formed job(9, GetParam());
  for (int i = 0; i < 9; ++i) EXPECT_EQ(job.member(i).rank(), i);
  job.run_for(100s);
  for (int i = 0; i < 9; ++i) EXPECT_FALSE(job.member(i).failure());
}

TEST_P(Seeds, GivesEveryMemberARankOfItsOwn) {
  const Formed job(9, GetParam(), /*gives_ranks=*/true);
  std::set<int> ranks;
  for (int i = 0; i < 9; ++i) ranks.insert(job.member(i).rank());
  EXPECT_EQ(ranks.size(), 9u);
  EXPECT_EQ(*ranks.begin(), 0);
  EXPECT_EQ(*ranks.rbegin(), 8);
}

TEST_P(Seeds, ADeathIsToldToAllAtOnce) {
  Formed job(9, GetParam());
  job.run_for(5s);
  job.kill(4);
  const Error error = job.ends(10ms);
  EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
  EXPECT_EQ(error.rank(), 4);
  EXPECT_THAT(error.what(), HasSubstr("rank 4 (node0, pid 1004) died: its connection closed"));
}

TEST_P(Seeds, ASilenceIsToldToAllAfterTheTimeout) {
  Formed job(9, GetParam());
  job.run_for(7s);
  job.stop(2);
  const auto start = job.now();
  EXPECT_EQ(job.ends(11s).rank(), 2);
  EXPECT_GE(job.now() - start, 8s);  // its last heartbeat was up to a fifth of the timeout ago
  // It wakes and finds out that the others went on without it.
  job.wake(2);
  job.run_for(10ms);
  ASSERT_TRUE(job.member(2).failure());
  EXPECT_THAT(job.member(2).failure()->what(), HasSubstr("has been silent for 10s"));
}

TEST_P(Seeds, AShortSilenceIsForgiven) {
  Formed job(9, GetParam());
  job.run_for(7s);
  job.stop(2);
  job.run_for(7s);
  job.wake(2);
  job.run_for(60s);
  for (int i = 0; i < 9; ++i) EXPECT_FALSE(job.member(i).failure());
}

TEST_P(Seeds, AMismatchNamesTheOddOneOut) {
  Formed job(9, GetParam());
  for (int i = 0; i < 9; ++i) {
    job.set_progress(i, {{0, 17, true, i == 6 ? "barrier" : "all_reduce sum f32 x 100"}});
  }
  const Error error = job.ends(5s);
  EXPECT_EQ(error.code(), ErrorCode::kCollectiveMismatch);
  EXPECT_EQ(error.rank(), 6);
  EXPECT_THAT(error.what(), HasSubstr("called barrier"));
}

TEST_P(Seeds, ACascadeEndsWithItsRoot) {
  Formed job(9, GetParam());
  // Rank 3 dies; its neighbours lose it and each other, and say so before the death is known.
  for (int i = 0; i < 3; ++i) job.report(i, Error(ErrorCode::kChannelClosed, "closed", i + 1));
  job.kill(3);
  EXPECT_EQ(job.ends(400ms).rank(), 3);
}

TEST_P(Seeds, GoodbyesHarmNobody) {
  Formed job(9, GetParam());
  job.run_for(3s);
  for (int i = 0; i < 8; ++i) {
    job.leave(i);
    job.run_for(1s);
  }
  job.run_for(30s);
  EXPECT_FALSE(job.member(8).failure());
  EXPECT_FALSE(job.centre().verdict());
}

TEST_P(Seeds, AGoodbyeThatOthersWaitForIsNamed) {
  Formed job(9, GetParam());
  job.set_progress(5, {{0, 3, false, "barrier"}});
  job.leave(5);
  for (int i = 0; i < 9; ++i) job.set_progress(i, {{0, 4, true, "barrier"}});
  const Error error = job.ends(5s);
  EXPECT_EQ(error.rank(), 5);
  EXPECT_THAT(error.what(), HasSubstr("has left the job after collective 3"));
}

TEST_P(Seeds, WhoIsMissingIsToldBeforeAnybodyGivesUp) {
  JobSimulator job({.members = 5, .seed = GetParam()});
  for (const int member : {0, 1, 3, 4}) job.start(member);
  job.kill(1);
  EXPECT_TRUE(job.run_until(
      [&] { return job.member(0).failure() && job.member(3).failure() && job.member(4).failure(); },
      10s));
  EXPECT_THAT(job.member(0).failure()->what(),
              HasSubstr("2 of 5 ranks did not come to the rendezvous in time: rank 1 (node0, pid "
                        "1001), which came and went, rank 2"));
}

TEST_P(Seeds, MembersGoOnWithoutACentreThatLeft) {
  Formed job(5, GetParam());
  job.centre_leaves();
  job.run_for(60s);
  for (int i = 0; i < 5; ++i) {
    EXPECT_FALSE(job.member(i).failure());
    EXPECT_TRUE(job.member(i).centre_left());
  }
}

TEST(JobSimulator, AFailingSeedReplaysExactly) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> seen;
  for (int run = 0; run < 2; ++run) {
    Formed job(40, 7);
    job.run_for(20s);
    job.kill(9);
    job.ends(10ms);
    seen.emplace_back(job.messages(), job.now().time_since_epoch().count());
  }
  EXPECT_EQ(seen[0], seen[1]);
}

// Forms, works for a minute, loses one and ends, with thousands of members.
TEST(JobSimulator, Thousands) {
  const int members = kSanitizers.empty() ? 4096 : 256;
  JobSimulator job({.members = members, .timeout = 30s});
  job.start_all();
  job.run_for(100ms);
  ASSERT_TRUE(job.all_formed());
  const auto formed = std::pair(job.messages(), job.bytes());
  job.run_for(60s);
  const auto worked = std::pair(job.messages(), job.bytes());
  job.kill(members / 2);
  job.run_for(100ms);
  ASSERT_TRUE(job.common_failure());
  EXPECT_EQ(job.common_failure()->rank(), members / 2);
  const auto n = static_cast<std::uint64_t>(members);
  EXPECT_EQ(formed.first, 2 * n + 2 * n);  // join and roster, then a heartbeat each way
  RecordProperty("bytes to form", std::to_string(formed.second));
  // A heartbeat each way every fifth of the timeout.
  EXPECT_NEAR(static_cast<double>(worked.first - formed.first), 10.0 * 2 * static_cast<double>(n),
              4.0 * static_cast<double>(n));
  EXPECT_LE(job.messages() - worked.first, 2 * n);
}

// The same with goodbyes instead of a loss: nothing is quadratic.
TEST(JobSimulator, AThousandGoodbyes) {
  const int members = kSanitizers.empty() ? 1024 : 256;
  JobSimulator job({.members = members, .timeout = 30s});
  job.start_all();
  job.run_for(100ms);
  ASSERT_TRUE(job.all_formed());
  for (int i = 0; i < members; ++i) {
    job.set_progress(i, {{0, 1000, false, "barrier"}, {1, 7, false, "all_reduce sum f32 x 100"}});
  }
  for (int i = 0; i < members; ++i) job.leave(i);
  job.run_for(1s);
  EXPECT_FALSE(job.centre().verdict());
}

}  // namespace
}  // namespace lockstep::job_simulator_test

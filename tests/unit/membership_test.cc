#include "lockstep/server/membership.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::membership_test {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;

class MembershipTest : public ::testing::Test {
 protected:
  int join(const std::string& node, bool ours = true) {
    return membership
        .join({.node_id = node, .backend = "cpu", .address = "here", .ours = ours}, now)
        .worker;
  }
  // Looks at them as often as a server does.
  std::optional<Error> judge_after(Membership::Clock::duration time) {
    const auto end = now + time;
    while (now + 2s < end) {
      now += 2s;
      if (auto error = membership.judge(now)) return error;
    }
    now = end;
    return membership.judge(now);
  }

  Membership::Time now{1h};
  Membership membership{2, 10s, now};
};

TEST_F(MembershipTest, GivesTheLowestFreePlace) {
  EXPECT_EQ(join("a"), 0);
  EXPECT_EQ(membership.name(0), "worker 0 (a, here)");
  membership.forget(0);
  EXPECT_EQ(join("b"), 0);
  EXPECT_FALSE(membership.complete());
  EXPECT_EQ(join("c"), 1);
  EXPECT_TRUE(membership.complete());
}

TEST_F(MembershipTest, GivesThePlaceAskedFor) {
  EXPECT_EQ(membership.join({.node_id = "b", .backend = "", .address = "", .place = 1}, now).worker,
            1);
  EXPECT_EQ(membership.join({.node_id = "a", .backend = "", .address = "", .place = 0}, now).worker,
            0);
}

TEST_F(MembershipTest, RefusesWhoComesLate) {
  join("a");
  join("b");
  const auto late = membership.join({.node_id = "c", .backend = "", .address = "there"}, now);
  EXPECT_EQ(late.worker, -1);
  EXPECT_THAT(late.refusal, HasSubstr("runs already with all its 2 workers"));
}

TEST_F(MembershipTest, NotAllCame) {
  join("a");
  EXPECT_EQ(membership.wake_at(), now);  // a heartbeat is due
  EXPECT_TRUE(membership.take_heartbeat(now));
  EXPECT_EQ(membership.wake_at(), now + 2s);
  now += 99s;
  membership.heard(0, now);
  EXPECT_FALSE(membership.judge(now));
  const auto error = judge_after(1s);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->rank(), -1);
  EXPECT_THAT(error->what(), HasSubstr("1 of 2 workers joined within 100s: worker 0 (a, here)"));
}

TEST_F(MembershipTest, SilenceIsDeath) {
  join("a");
  join("b");
  EXPECT_FALSE(judge_after(6s));
  membership.heard(0, now);
  EXPECT_FALSE(judge_after(3999ms));
  membership.owe(1, "block 3 of step 7", now);
  const auto error = judge_after(1ms);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kPeerLost);
  EXPECT_EQ(error->rank(), 1);
  EXPECT_THAT(
      error->what(),
      HasSubstr("nothing was heard of worker 1 (b, here), which owes block 3 of step 7, for 10s"));
}

TEST_F(MembershipTest, AStopOfTheServersOwnIsNobodysSilence) {
  join("a");
  join("b");
  membership.owe(1, "block 3 of step 7", now);
  EXPECT_FALSE(judge_after(4s));
  now += 1h;
  EXPECT_FALSE(membership.judge(now));
  EXPECT_FALSE(judge_after(5999ms));  // the silence before still counts
  EXPECT_TRUE(judge_after(1ms));
}

TEST_F(MembershipTest, SilenceOfWhomNobodyListensToMeansNothing) {
  join("a");
  join("old", false);
  membership.watch(0, false, now);
  EXPECT_FALSE(judge_after(1h));
  membership.watch(0, true, now);  // counts from here
  membership.watch(1, true, now);
  EXPECT_FALSE(judge_after(9s));
  membership.watch(1, true, now);  // does not start again
  membership.heard(0, now);
  const auto error = judge_after(1s);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->rank(), 1);
}

TEST_F(MembershipTest, AliveButAbsent) {
  join("a");
  join("b");
  membership.owe(0, "the gradient vector of step 1", now);
  membership.owe(1, "the gradient vector of step 1", now);
  membership.brought(0);
  for (int i = 0; i < 20; ++i) {
    const auto error = judge_after(5s);
    if (i < 19) {
      ASSERT_FALSE(error);
    } else {
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code(), ErrorCode::kTimeout);
      EXPECT_EQ(error->rank(), 1);
      EXPECT_THAT(error->what(),
                  HasSubstr("has not brought the gradient vector of step 1 within 100s"));
    }
    membership.heard(0, now);
    membership.heard(1, now);
  }
}

}  // namespace
}  // namespace lockstep::membership_test

#include "lockstep/launch/restart_policy.h"

#include <gtest/gtest.h>

#include <csignal>
#include <vector>

namespace lockstep::restart_policy_test {
namespace {

using namespace std::chrono_literals;
using Due = RestartPolicy::Due;

constexpr ProcessEnd kCrash = {true, SIGKILL};
const RestartPolicy::Time kBegin{1000s};

TEST(RestartPolicy, WhoEndsInOrderStaysAway) {
  for (const ProcessEnd end :
       {ProcessEnd{false, 0}, ProcessEnd{false, 2}, ProcessEnd{false, 3}, ProcessEnd{false, 130},
        ProcessEnd{false, 143}, ProcessEnd{true, SIGTERM}, ProcessEnd{true, SIGINT}}) {
    RestartPolicy policy;
    policy.started(0, kBegin);
    EXPECT_FALSE(policy.ended(0, end, kBegin + 1s)) << end.number;
    EXPECT_EQ(policy.next(), std::nullopt);
  }
  for (const ProcessEnd end :
       {kCrash, ProcessEnd{true, SIGSEGV}, ProcessEnd{false, 1}, ProcessEnd{false, 4}}) {
    RestartPolicy policy;
    policy.started(0, kBegin);
    EXPECT_TRUE(policy.ended(0, end, kBegin + 1s)) << end.number;
    EXPECT_EQ(policy.next(), kBegin + 1500ms);
  }
}

TEST(RestartPolicy, ComesBackOnceWhenItsTimeHasCome) {
  RestartPolicy policy;
  for (const int place : {0, 1, 2}) policy.started(place, kBegin);
  policy.ended(2, kCrash, kBegin + 1s);
  policy.ended(0, kCrash, kBegin + 2s);
  EXPECT_EQ(policy.next(), kBegin + 1500ms);
  EXPECT_TRUE(policy.take_due(kBegin + 1499ms).empty());
  EXPECT_EQ(policy.take_due(kBegin + 1500ms), std::vector{Due{2}});
  EXPECT_TRUE(policy.take_due(kBegin + 1500ms).empty());
  EXPECT_EQ(policy.next(), kBegin + 2500ms);
  EXPECT_EQ(policy.take_due(kBegin + 10s), std::vector{Due{0}});
  EXPECT_EQ(policy.next(), std::nullopt);
}

TEST(RestartPolicy, IsGivenUpAfterThreeStartsWithoutAStep) {
  RestartPolicy policy;
  RestartPolicy::Time now = kBegin;
  policy.started(1, now);
  for (const auto pause : {500ms, 1000ms, 2000ms}) {
    EXPECT_TRUE(policy.ended(1, kCrash, now));
    EXPECT_EQ(policy.pause_of(1), pause);
    now += pause;
    EXPECT_EQ(policy.take_due(now), std::vector{Due{1}});
    policy.started(1, now);
  }
  policy.ended(1, kCrash, now);
  // Another one has starts of its own.
  policy.started(0, now);
  policy.ended(0, kCrash, now);
  EXPECT_EQ(policy.take_due(now + 1min), (std::vector{Due{0, false}, Due{1, true}}));
  EXPECT_EQ(policy.next(), std::nullopt);
}

TEST(RestartPolicy, AStepThatIsHeardOfLateCounts) {
  RestartPolicy policy;
  RestartPolicy::Time now = kBegin;
  for (int i = 0; i < 4; ++i, now += 1h) {
    policy.started(1, now);
    policy.ended(1, kCrash, now);
    if (i == 3) policy.took_part(1);  // after its end
    EXPECT_EQ(policy.take_due(now + 30min), (std::vector{Due{1, false}}));
  }
}

TEST(RestartPolicy, AStepBringsTheStartsBackAndLastingBringsThePauseBack) {
  RestartPolicy policy;
  RestartPolicy::Time now = kBegin;
  policy.started(0, now);
  std::vector<std::chrono::milliseconds> pauses;
  for (int i = 0; i < 9; ++i) {
    policy.took_part(0);
    ASSERT_TRUE(policy.ended(0, kCrash, now));
    pauses.push_back(policy.pause_of(0));
    now = *policy.next();
    ASSERT_EQ(policy.take_due(now), std::vector{Due{0}});
    policy.started(0, now);
  }
  EXPECT_EQ(pauses,
            (std::vector<std::chrono::milliseconds>{500ms, 1s, 2s, 4s, 8s, 16s, 30s, 30s, 30s}));
  policy.took_part(0);
  policy.ended(0, kCrash, now + 5min);
  EXPECT_EQ(policy.pause_of(0), 500ms);
}

TEST(RestartPolicy, NobodyComesBackAfterTheStop) {
  RestartPolicy policy;
  policy.started(0, kBegin);
  policy.started(1, kBegin);
  policy.ended(0, kCrash, kBegin);
  policy.stop();
  EXPECT_EQ(policy.next(), std::nullopt);
  EXPECT_TRUE(policy.take_due(kBegin + 1h).empty());
  EXPECT_FALSE(policy.ended(1, kCrash, kBegin));
}

TEST(ProcessEnd, IsReadFromAStatus) {
  EXPECT_TRUE(ProcessEnd::of(SIGKILL).killed);
  EXPECT_EQ(ProcessEnd::of(SIGKILL).number, SIGKILL);
  EXPECT_FALSE(ProcessEnd::of(3 << 8).killed);
  EXPECT_EQ(ProcessEnd::of(3 << 8).number, 3);
}

TEST(ProcessEnd, TellsAFaultOfItsOwnFromOneFromOutside) {
  for (const int signal : {SIGSEGV, SIGBUS, SIGABRT}) {
    EXPECT_TRUE((ProcessEnd{true, signal}.own_fault()));
  }
  for (const int signal : {SIGKILL, SIGTERM, SIGINT, SIGHUP}) {
    EXPECT_FALSE((ProcessEnd{true, signal}.own_fault()));
  }
  EXPECT_TRUE((ProcessEnd{false, 1}.own_fault()));
  EXPECT_FALSE((ProcessEnd{false, 0}.own_fault()));
  EXPECT_EQ(to_string(ProcessEnd{true, SIGKILL}), "was killed by signal 9 (Killed)");
  EXPECT_EQ(to_string(ProcessEnd{false, 1}), "failed, with exit code 1");
}

}  // namespace
}  // namespace lockstep::restart_policy_test

#include "lockstep/base/deadline.h"

#include <gtest/gtest.h>

namespace lockstep::deadline_test {
namespace {

using namespace std::chrono_literals;

TEST(Deadline, FarFutureDoesNotOverflow) {
  EXPECT_FALSE(Deadline::after(Deadline::Clock::duration::max()).expired());
}

TEST(Deadline, PastIsExpiredWithNothingRemaining) {
  const Deadline past = Deadline::after(-1s);
  EXPECT_TRUE(past.expired());
  EXPECT_EQ(past.remaining(), 0ns);
  EXPECT_EQ(past.poll_timeout(), 0);
}

TEST(Deadline, PollTimeoutRoundsUpAndIsCut) {
  EXPECT_GE(Deadline::after(1ms + 1us).poll_timeout(), 1);
  EXPECT_EQ(Deadline::after(10s).poll_timeout(50ms), 50);
}

TEST(Deadline, EarlierPicksTheSooner) {
  const Deadline soon = Deadline::after(1s);
  EXPECT_EQ(earlier(soon, Deadline::after(2s)).time(), soon.time());
}

}  // namespace
}  // namespace lockstep::deadline_test

#include "lockstep/net/job/machine_sleep.h"

#include <gtest/gtest.h>

#include <chrono>

namespace lockstep::machine_sleep_test {
namespace {

TEST(MachineSleep, IsNothingWhereTheMachineIsAwake) {
  MachineSleep sleep;
  for (int i = 0; i < 3; ++i) {
    const auto slept = sleep.take();
    EXPECT_GE(slept, Deadline::Clock::duration::zero());
    EXPECT_LT(slept, std::chrono::seconds(1));
  }
}

}  // namespace
}  // namespace lockstep::machine_sleep_test

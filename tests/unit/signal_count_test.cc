#include "lockstep/base/signal_count.h"

#include <gtest/gtest.h>

namespace lockstep::signal_count_test {
namespace {

using namespace std::chrono_literals;
using Meaning = SignalCount::Meaning;

const std::chrono::steady_clock::time_point kBegin{1000s};

TEST(SignalCount, TheSameWithinASecondIsOne) {
  SignalCount count;
  EXPECT_EQ(count.first(), 0);
  EXPECT_EQ(count.take(15, kBegin), Meaning::kFirst);
  EXPECT_EQ(count.first(), 15);
  EXPECT_EQ(count.take(15, kBegin), Meaning::kSameAgain);
  EXPECT_EQ(count.take(15, kBegin + 999ms), Meaning::kSameAgain);
  EXPECT_EQ(count.take(15, kBegin + 1s), Meaning::kSecond);
}

TEST(SignalCount, AnotherOneIsASecondAtOnce) {
  SignalCount count;
  EXPECT_EQ(count.take(2, kBegin), Meaning::kFirst);
  EXPECT_EQ(count.take(15, kBegin + 1ms), Meaning::kSecond);
  EXPECT_EQ(count.first(), 2);
}

}  // namespace
}  // namespace lockstep::signal_count_test

#include "lockstep/comm/collectives/rails.h"

#include <gtest/gtest.h>

namespace lockstep::rails_test {
namespace {

constexpr std::size_t kMiB = 1024 * 1024;

TEST(Rails, AreAsManyAsTheBytesAreWorth) {
  EXPECT_EQ(rails_for(0, 4), 1);
  EXPECT_EQ(rails_for(kMiB - 1, 4), 1);
  EXPECT_EQ(rails_for(kMiB, 4), 2);
  EXPECT_EQ(rails_for(2 * kMiB, 4), 4);
  EXPECT_EQ(rails_for(64 * kMiB, 4), 4);
  EXPECT_EQ(rails_for(64 * kMiB, 1), 1);
}

}  // namespace
}  // namespace lockstep::rails_test

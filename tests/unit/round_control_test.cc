#include "lockstep/server/round_control.h"

#include <gtest/gtest.h>

namespace lockstep::round_control_test {
namespace {

TEST(RoundControl, OneStampThatDiffersIsSeenByEveryRank) {
  MeshFrame usual;
  usual.count = 5;
  MeshFrame odd = usual;
  odd.bucket = 1;
  const RoundControl a(usual, false);
  const RoundControl b(odd, true);
  std::vector<double> same(RoundControl::kNumbers);
  std::vector<double> mixed(RoundControl::kNumbers);
  for (std::size_t i = 0; i < RoundControl::kNumbers; ++i) {
    same[i] = 4096 * a.numbers()[i];
    mixed[i] = 4095 * a.numbers()[i] + b.numbers()[i];
  }
  EXPECT_TRUE(a.agrees(same));
  EXPECT_FALSE(b.agrees(same));
  EXPECT_FALSE(a.agrees(mixed));
  EXPECT_FALSE(b.agrees(mixed));
  EXPECT_EQ(same[RoundControl::kLast], 0);
  EXPECT_EQ(mixed[RoundControl::kLast], 1);
}

}  // namespace
}  // namespace lockstep::round_control_test

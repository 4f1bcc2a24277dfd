#include "lockstep/net/job/blame.h"

#include <gtest/gtest.h>

namespace lockstep::blame_test {
namespace {

TEST(Blame, AnErrorThatNamesAnotherIsAnEcho) {
  EXPECT_EQ(evidence_of(Error(ErrorCode::kPeerLost, "rank 2 died", 2), 1), Evidence::kEcho);
  EXPECT_EQ(evidence_of(Error(ErrorCode::kNonFinite, "NaN", 1), 1), Evidence::kOwn);
  EXPECT_EQ(evidence_of(Error(ErrorCode::kIo, "the disk is full"), 1), Evidence::kOwn);
  EXPECT_EQ(evidence_of(Error(ErrorCode::kNonFinite, "rank 0 sent NaN", 0), -1), Evidence::kEcho);
}

TEST(Blame, WhoeverTellsTheMostAndAmongEqualsTheFirst) {
  Blame blame;
  EXPECT_FALSE(blame.culprit());
  EXPECT_FALSE(blame.add(4, Evidence::kNone));
  EXPECT_FALSE(blame.culprit());
  EXPECT_TRUE(blame.add(0, Evidence::kEcho));
  EXPECT_FALSE(blame.add(1, Evidence::kEcho));
  EXPECT_EQ(blame.culprit(), 0);
  EXPECT_TRUE(blame.add(2, Evidence::kOwn));
  EXPECT_FALSE(blame.add(0, Evidence::kOwn));
  EXPECT_EQ(blame.culprit(), 2);
  EXPECT_TRUE(blame.add(-1, Evidence::kKilled));
  EXPECT_EQ(blame.culprit(), -1);
  EXPECT_EQ(blame.evidence(), Evidence::kKilled);
}

}  // namespace
}  // namespace lockstep::blame_test

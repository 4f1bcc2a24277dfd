#include "lockstep/launch/rank_lines.h"

#include <gtest/gtest.h>

namespace lockstep::rank_lines_test {
namespace {

TEST(RankLines, EveryWholeLineHasThePrefix) {
  RankLines lines("[rank 2] ");
  EXPECT_EQ(lines.take("one\ntwo\nthr"), "[rank 2] one\n[rank 2] two\n");
  EXPECT_EQ(lines.take("ee"), "");
  EXPECT_EQ(lines.take("\n"), "[rank 2] three\n");
  EXPECT_EQ(lines.last_line(), "three");
  EXPECT_EQ(lines.take("the end"), "");
  EXPECT_EQ(lines.end(), "[rank 2] the end\n");
  EXPECT_EQ(lines.last_line(), "the end");
  EXPECT_EQ(lines.end(), "");
}

TEST(RankLines, ARankMayChange) {
  RankLines lines("[newcomer] ");
  EXPECT_EQ(lines.take("one\ntwo"), "[newcomer] one\n");
  lines.set_prefix("[rank 2] ");
  EXPECT_EQ(lines.take("\n"), "[rank 2] two\n");
}

TEST(RankLines, WithoutAPrefixNothingChanges) {
  RankLines lines;
  EXPECT_EQ(lines.take("a\n\nb\n"), "a\n\nb\n");
  EXPECT_EQ(lines.last_line(), "b");
}

TEST(RankLines, ABarIsPassedOnAtOnceAndHasNoPrefix) {
  RankLines lines("[rank 0] ");
  EXPECT_EQ(lines.take("hello\n\r[=  ] 1/3\x1b[K"), "[rank 0] hello\n\r[=  ] 1/3\x1b[K");
  EXPECT_TRUE(lines.bar_is_open());
  EXPECT_EQ(lines.take("\r[== ]"), "\r[== ]");
  EXPECT_EQ(lines.take(" 2/3\x1b[K"), " 2/3\x1b[K");
  EXPECT_EQ(lines.take("\n"), "\n");
  EXPECT_FALSE(lines.bar_is_open());
  EXPECT_EQ(lines.last_line(), "hello");
  EXPECT_EQ(lines.take("bye\n"), "[rank 0] bye\n");
}

TEST(RankLines, OneThatEndsInAReturnIsABarToo) {
  RankLines lines("[rank 0] ");
  EXPECT_EQ(lines.take("10 %\r"), "10 %\r");
  EXPECT_EQ(lines.take("20 %\r"), "20 %\r");
  EXPECT_EQ(lines.end(), "\n");
}

TEST(RankLines, WhatFollowsABarIsTheLastLine) {
  RankLines lines;
  lines.take("\r[== ] 2/3\x1b[K");
  EXPECT_EQ(lines.take("error: gone\n"), "error: gone\n");
  EXPECT_EQ(lines.last_line(), "error: gone");
}

// What a remote shell says before our program is there.
TEST(RankLines, OfAStrangerControlCharactersAreShown) {
  RankLines lines("[a] ");
  lines.set_foreign(true);
  EXPECT_EQ(lines.take("one\x1b[2J\rtwo\r\nbar\r\x1b[K"), "[a] one\\x1b[2J\\x0dtwo\n");
  EXPECT_FALSE(lines.bar_is_open());
  EXPECT_EQ(lines.last_line(), "one\\x1b[2J\\x0dtwo");
  EXPECT_EQ(lines.end(), "[a] bar\\x0d\\x1b[K\n");
  lines.set_foreign(false);
  EXPECT_EQ(lines.take("\r1/3\x1b[K"), "\r1/3\x1b[K");
}

}  // namespace
}  // namespace lockstep::rank_lines_test

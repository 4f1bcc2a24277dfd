#include "lockstep/base/log.h"

#include <gtest/gtest.h>

#include <string_view>

#include "lockstep/base/text.h"

namespace lockstep::log_test {
namespace {

TEST(Log, NobodyForgesALine) {
  ::testing::internal::CaptureStderr();
  log(LogLevel::kWarning, "turned {} away: {}", "10.0.0.3", "no\nerror: rank 1 died\x1b[2J");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "warning: turned 10.0.0.3 away: no\\x0aerror: rank 1 died\\x1b[2J\n");
}

TEST(Log, NobodyForgesALineInWhatIsNoWarning) {
  ::testing::internal::CaptureStderr();
  log(LogLevel::kInfo, "step 3: rank 2 ({}, pid 7) joined", "host\nerror: rank 1 was killed");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "step 3: rank 2 (host\\x0aerror: rank 1 was killed, pid 7) joined\n");
}

TEST(Log, KeepsUtf8) {
  ::testing::internal::CaptureStderr();
  log(LogLevel::kError, "a file named {}", "größe");
  log(LogLevel::kInfo, "größer");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "error: a file named größe\ngrößer\n");
}

TEST(Log, NoControlCharacterStays) {
  EXPECT_EQ(visible("a\tb\rc\x7f"), "a\\x09b\\x0dc\\x7f");
  EXPECT_EQ(visible(std::string_view("\0", 1)), "\\x00");
  // The second row of control characters, as UTF-8: U+009B begins a command to a terminal.
  EXPECT_EQ(visible("x\xc2\x9b!"), "x\\x9b!");
  EXPECT_EQ(visible("\xc2\xa0\xc3\x9b"), "\xc2\xa0\xc3\x9b");
  // The same as one byte, alone or where a character is cut off.
  EXPECT_EQ(visible("x\x9b!"), "x\\x9b!");
  EXPECT_EQ(visible("\xe2\x82\n\xff\xc2"), "\\xe2\\x82\\x0a\\xff\\xc2");
}

}  // namespace
}  // namespace lockstep::log_test

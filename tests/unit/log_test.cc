#include "lockstep/base/log.h"

#include <gtest/gtest.h>

namespace lockstep::log_test {
namespace {

TEST(Log, NobodyForgesALine) {
  ::testing::internal::CaptureStderr();
  log(LogLevel::kWarning, "turned {} away: {}", "10.0.0.3", "no\nerror: rank 1 died\x1b[2J");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "warning: turned 10.0.0.3 away: no\\x0aerror: rank 1 died\\x1b[2J\n");
}

TEST(Log, KeepsUtf8AndItsOwnLines) {
  ::testing::internal::CaptureStderr();
  log(LogLevel::kError, "a file named {}", "größe");
  log(LogLevel::kInfo, "two\nlines");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "error: a file named größe\ntwo\nlines\n");
}

}  // namespace
}  // namespace lockstep::log_test

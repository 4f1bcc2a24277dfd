#include "lockstep/files/folder_lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <thread>

#include "lockstep/base/error.h"
#include "tests/support/temporary_folder.h"

namespace lockstep::folder_lock_test {
namespace {

using ::testing::HasSubstr;

std::string refusal(const std::string& folder) {
  try {
    const FolderLock lock(folder, Deadline::after(std::chrono::milliseconds(30)));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

TEST(FolderLock, IsForOneAtATime) {
  const TemporaryFolder temporary;
  const std::string folder = temporary.path() + "/runs/one";
  std::optional<FolderLock> lock(folder);
  EXPECT_TRUE(std::filesystem::is_directory(folder));
  EXPECT_THAT(refusal(folder), HasSubstr("is writing to " + folder));
  EXPECT_EQ(refusal(temporary.path() + "/runs/two"), "");
  lock.reset();
  EXPECT_EQ(refusal(folder), "");
}

TEST(FolderLock, NamesTheOther) {
  const TemporaryFolder temporary;
  const FolderLock lock(temporary.path() + "/run");
  EXPECT_THAT(refusal(temporary.path() + "/run"),
              HasSubstr("another run (process " + std::to_string(::getpid()) + ")"));
}

TEST(FolderLock, WaitsUntilItsDeadline) {
  const TemporaryFolder temporary;
  const FolderLock lock(temporary.path() + "/run");
  const auto begin = Deadline::Clock::now();
  EXPECT_NE(refusal(temporary.path() + "/run"), "");
  EXPECT_GE(Deadline::Clock::now() - begin, std::chrono::milliseconds(30));
}

TEST(FolderLock, IsTakenWhenTheOtherEnds) {
  const TemporaryFolder temporary;
  std::optional<FolderLock> first(temporary.path() + "/run");
  std::thread other([&] { const FolderLock second(temporary.path() + "/run"); });
  first.reset();
  other.join();
}

TEST(FolderLock, NeedsAFolder) { EXPECT_THROW(FolderLock("/proc/no folder here"), Error); }

}  // namespace
}  // namespace lockstep::folder_lock_test

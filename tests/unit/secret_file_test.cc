#include "lockstep/launch/secret_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

#include "lockstep/base/error.h"
#include "tests/support/temporary_folder.h"

namespace lockstep::secret_file_test {
namespace {

constexpr std::uint16_t kPort = 4711;

// With a folder for files of a user who is logged in.
class SecretFileTest : public ::testing::Test {
 protected:
  SecretFileTest() {
    const char* before = std::getenv(kVariable);
    if (before != nullptr) before_ = before;
    ::setenv(kVariable, folder_.path().c_str(), 1);
    ::chmod(folder_.path().c_str(), 0700);
  }
  ~SecretFileTest() override {
    if (before_) {
      ::setenv(kVariable, before_->c_str(), 1);
    } else {
      ::unsetenv(kVariable);
    }
  }
  std::string path() const { return folder_.path() + "/lockstep-4711"; }

  static constexpr const char* kVariable = "XDG_RUNTIME_DIR";
  TemporaryFolder folder_;
  std::optional<std::string> before_;
};

TEST_F(SecretFileTest, IsThisUsersAloneAndGoesWithItsJob) {
  EXPECT_EQ(read_secret_file(kPort), "");
  {
    const SecretFile file(kPort, "0123");
    struct stat entry {};
    ASSERT_EQ(::stat(path().c_str(), &entry), 0);
    EXPECT_EQ(entry.st_mode & 0777, 0600u);
    EXPECT_EQ(read_secret_file(kPort), "0123");
    EXPECT_EQ(read_secret_file(kPort + 1), "");
  }
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(SecretFileTest, OneThatOthersCanReadIsNotBelieved) {
  const SecretFile file(kPort, "0123");
  for (const mode_t rights : {0640, 0604, 0660}) {
    ::chmod(path().c_str(), rights);
    EXPECT_EQ(read_secret_file(kPort), "") << rights;
  }
  ::chmod(path().c_str(), 0600);
  EXPECT_EQ(read_secret_file(kPort), "0123");
  std::filesystem::rename(path(), path() + "-elsewhere");
  std::filesystem::create_symlink(path() + "-elsewhere", path());
  EXPECT_EQ(read_secret_file(kPort), "");
}

TEST_F(SecretFileTest, AFolderOfOthersIsRefused) {
  ::chmod(folder_.path().c_str(), 0755);
  try {
    const SecretFile file(kPort, "0123");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("is not this user's alone"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("--token-file"));
  }
  EXPECT_FALSE(std::filesystem::exists(path()));
}

// A link that somebody has put where the file will be.
TEST_F(SecretFileTest, NoLinkIsFollowed) {
  TemporaryFolder elsewhere;
  std::filesystem::create_symlink(elsewhere.path() + "/caught", path());
  const SecretFile file(kPort, "0123");
  EXPECT_FALSE(std::filesystem::exists(elsewhere.path() + "/caught"));
  EXPECT_EQ(read_secret_file(kPort), "0123");
}

}  // namespace
}  // namespace lockstep::secret_file_test

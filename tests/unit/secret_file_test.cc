#include "lockstep/launch/secret_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/base/error.h"
#include "tests/support/temporary_folder.h"

namespace lockstep::secret_file_test {
namespace {

const SocketAddress kBound = SocketAddress::loopback_v4(4711);

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
  std::string path() const { return folder_.path() + "/lockstep-127.0.0.1-4711"; }

  static constexpr const char* kVariable = "XDG_RUNTIME_DIR";
  TemporaryFolder folder_;
  std::optional<std::string> before_;
};

TEST_F(SecretFileTest, IsThisUsersAloneAndGoesWithItsJob) {
  EXPECT_EQ(read_secret_file(kBound), "");
  {
    const SecretFile file(kBound, "0123");
    struct stat entry {};
    ASSERT_EQ(::stat(path().c_str(), &entry), 0);
    EXPECT_EQ(entry.st_mode & 0777, 0600u);
    EXPECT_EQ(read_secret_file(kBound), "0123");
    EXPECT_EQ(read_secret_file(kBound.with_port(4712)), "");
  }
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(SecretFileTest, JobsAtTwoAddressesWithOnePortHaveTheirOwn) {
  const SocketAddress other = SocketAddress::loopback_v6(4711);
  const SecretFile file(kBound, "0123");
  {
    const SecretFile second(other, "4567");
    EXPECT_EQ(read_secret_file(kBound), "0123");
    EXPECT_EQ(read_secret_file(other), "4567");
  }
  EXPECT_EQ(read_secret_file(kBound), "0123");
}

TEST_F(SecretFileTest, OfAJobThatListensEverywhereIsFoundByAnyAddress) {
  for (const int family : {AF_INET, AF_INET6}) {
    const SecretFile file(SocketAddress::any(family, 4711), "0123");
    EXPECT_EQ(read_secret_file(kBound), "0123");
    EXPECT_EQ(read_secret_file(SocketAddress::loopback_v6(4711)), "0123");
  }
}

// The first job has lost its address, and the next has it.
TEST_F(SecretFileTest, IsNotRemovedWhenItIsAnothers) {
  std::optional<SecretFile> first(std::in_place, kBound, "0123");
  const SecretFile second(kBound, "4567");
  first.reset();
  EXPECT_EQ(read_secret_file(kBound), "4567");
}

TEST_F(SecretFileTest, OneThatOthersCanReadIsNotBelieved) {
  const SecretFile file(kBound, "0123");
  for (const mode_t rights : {0640, 0604, 0660}) {
    ::chmod(path().c_str(), rights);
    EXPECT_EQ(read_secret_file(kBound), "") << rights;
  }
  ::chmod(path().c_str(), 0600);
  EXPECT_EQ(read_secret_file(kBound), "0123");
  std::filesystem::rename(path(), path() + "-elsewhere");
  std::filesystem::create_symlink(path() + "-elsewhere", path());
  EXPECT_EQ(read_secret_file(kBound), "");
}

TEST_F(SecretFileTest, AFolderOfOthersIsRefused) {
  ::chmod(folder_.path().c_str(), 0755);
  try {
    const SecretFile file(kBound, "0123");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("is not this user's alone"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("--token-file"));
  }
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(SecretFileTest, OneThatCannotBeWrittenIsNotLeft) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto old = ::signal(SIGXFSZ, SIG_IGN);
  for (const rlim_t room : {0, 2}) {
    const rlimit small = {room, before.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &small);
    std::string said;
    try {
      const SecretFile file(kBound, "0123");
    } catch (const Error& error) {
      said = error.what();
    }
    ::setrlimit(RLIMIT_FSIZE, &before);
    EXPECT_THAT(said, ::testing::HasSubstr("writing " + path())) << room;
    EXPECT_FALSE(std::filesystem::exists(path())) << room;
  }
  ::signal(SIGXFSZ, old);
}

// Other users can make the folder in /tmp, where a pipe would hold up whoever joins a job.
TEST_F(SecretFileTest, APipeInItsPlaceIsNotWaitedFor) {
  ASSERT_EQ(::mkfifo(path().c_str(), 0600), 0);
  EXPECT_EQ(read_secret_file(kBound), "");
}

// A link that somebody has put where the file will be.
TEST_F(SecretFileTest, NoLinkIsFollowed) {
  TemporaryFolder elsewhere;
  std::filesystem::create_symlink(elsewhere.path() + "/caught", path());
  const SecretFile file(kBound, "0123");
  EXPECT_FALSE(std::filesystem::exists(elsewhere.path() + "/caught"));
  EXPECT_EQ(read_secret_file(kBound), "0123");
}

}  // namespace
}  // namespace lockstep::secret_file_test

#include "lockstep/net/socket/unix_socket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <utility>

#include "lockstep/net/job/handshake.h"
#include "lockstep/net/socket/peer_user.h"
#include "tests/support/other_user.h"
#include "tests/support/ranks.h"

namespace lockstep::unix_socket_test {
namespace {

using ::testing::HasSubstr;
using namespace test;

std::string unique_name() { return "lockstep-test-" + to_string(random_member_id()); }

TEST(UnixSocket, CarriesDescriptors) {
  const std::string name = unique_name();
  const Socket listener = listen_unix(name);
  const Socket client = connect_unix(name, soon());
  const Socket server = accept(listener, soon());
  require_trusted_peer(server);
  require_trusted_peer(client);

  const Descriptor memory(::memfd_create("test", MFD_CLOEXEC));
  ASSERT_EQ(::write(memory.get(), "lockstep", 8), 8);
  const int descriptors[] = {memory.get(), memory.get()};
  send_descriptors(client, descriptors, soon());
  const auto received = receive_descriptors(server, 2, soon());
  ASSERT_EQ(received.size(), 2u);
  char text[8];
  ASSERT_EQ(::pread(received[1].get(), text, sizeof(text), 0), 8);
  EXPECT_EQ(std::string(text, 8), "lockstep");
}

TEST(UnixSocket, AnotherNumberOfDescriptorsIsRefusedAndLeaksNone) {
  auto [a, b] = unix_socket_pair();
  const int descriptors[] = {STDERR_FILENO, STDERR_FILENO, STDERR_FILENO};
  const Descriptor before(::dup(STDERR_FILENO));
  send_descriptors(a, descriptors, soon());
  EXPECT_EQ(error_of([&, &socket = b] { receive_descriptors(socket, 2, soon()); }).code(),
            ErrorCode::kUnexpectedMessage);
  const Descriptor after(::dup(STDERR_FILENO));
  EXPECT_EQ(after.get(), before.get() + 1);
}

TEST(UnixSocket, ReceivingEndsAtTheDeadlineOrWhenThePeerCloses) {
  auto [a, b] = unix_socket_pair();
  EXPECT_EQ(
      error_of([&, &socket = b] { receive_descriptors(socket, 1, Deadline::after(10ms)); }).code(),
      ErrorCode::kTimeout);
  a = Socket();
  EXPECT_EQ(error_of([&, &socket = b] { receive_descriptors(socket, 1, soon()); }).code(),
            ErrorCode::kChannelClosed);
}

TEST(UnixSocket, WhoMayHaveNoMoreDescriptorsBlamesNobodyElse) {
  auto [a, b] = unix_socket_pair();
  b.set_peer("rank 2", 2);
  const std::array<int, 2> sent{a.fd(), b.fd()};
  send_descriptors(a, sent, soon());
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{3, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const Error error = error_of([&, &socket = b] { receive_descriptors(socket, 2, soon()); });
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(error.code(), ErrorCode::kIo);
  EXPECT_EQ(error.rank(), -1);
  EXPECT_THAT(error.what(), HasSubstr("Too many open files"));
}

TEST(UnixSocket, NobodyListensIsNoConnection) {
  EXPECT_EQ(error_of([] { connect_unix(unique_name(), soon()); }).code(), ErrorCode::kNoConnection);
}

TEST(UnixSocket, AFullQueueEndsAtTheDeadline) {
  const std::string name = unique_name();
  const Socket listener = listen_unix(name);
  std::vector<Socket> clients;
  const Error error = error_of([&] {
    while (true) clients.push_back(connect_unix(name, Deadline::after(10ms)));
  });
  EXPECT_TRUE(error.code() == ErrorCode::kTimeout || error.code() == ErrorCode::kIo)
      << error.what();
}

TEST(UnixSocket, AnotherUserIsNoPeer) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can run a process as another user";
  const std::string name = "lockstep-test-other-user-" + std::to_string(::getpid());
  {
    Socket listener;
    const OtherUser other([&] { listener = listen_unix(name); });
    const Error error = error_of([&] { connect_unix(name, soon()); });
    EXPECT_EQ(error.code(), ErrorCode::kAuthentication) << error.what();
  }
  const Socket listener = listen_unix(name);
  Socket caller;
  const OtherUser other([&] { caller = connect_unix(name, soon()); });
  const Socket visitor = accept(listener, soon());
  EXPECT_EQ(error_of([&] { require_trusted_peer(visitor); }).code(), ErrorCode::kAuthentication);
}

TEST(UnixSocket, NamesAreBounded) {
  EXPECT_EQ(error_of([] { listen_unix(""); }).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_of([] { listen_unix(std::string(108, 'x')); }).code(),
            ErrorCode::kInvalidArgument);
  listen_unix(unique_name().substr(0, 40) + std::string(67, 'x'));
}

}  // namespace
}  // namespace lockstep::unix_socket_test

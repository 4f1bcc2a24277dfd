#include "lockstep/net/socket/peer_user.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "tests/support/other_user.h"
#include "tests/support/ranks.h"

namespace lockstep::peer_user_test {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using namespace test;

// As Linux 6 prints it: one connection of user 1000, one that is waiting for its end, one of root.
constexpr const char* kTable =
    R"(  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1234 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  1000        0 52734 1 0 20 4 30 10 -1
   1: 0100007F:1235 0100007F:9C40 06 00000000:00000000 03:00000000 00000000     0        0 0 3 0
   2: 0100007F:9C40 0100007F:1234 01 00000000:00000000 00:00000000 00000000     0        0 52735 1 0 20 4 30 10 -1
)";
constexpr const char* kTable6 =
    R"(  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0000000000000000FFFF00000100007F:1236 0000000000000000FFFF00000100007F:9C40 01 00000000:00000000 00:00000000 00000000   7        0 99 1
   1: 00000000000000000000000001000000:1237 00000000000000000000000001000000:9C40 01 00000000:00000000 00:00000000 00000000   8        0 99 1
)";

SocketAddress at(int port) { return SocketAddress::loopback_v4(static_cast<std::uint16_t>(port)); }

TEST(PeerUser, IsFoundInTheTableByBothAddresses) {
  EXPECT_EQ(owner_in_table(kTable, at(0x1234), at(0x9c40)), 1000u);
  EXPECT_EQ(owner_in_table(kTable, at(0x9c40), at(0x1234)), 0u);
  EXPECT_EQ(owner_in_table(kTable, at(0x1234), at(0x9c41)), std::nullopt);
  EXPECT_EQ(owner_in_table("", at(0x1234), at(0x9c40)), std::nullopt);
  EXPECT_EQ(owner_in_table("\n\n  0: x\n", at(0x1234), at(0x9c40)), std::nullopt);
}

// The table says root of sockets that no process has: another user's that has just closed.
TEST(PeerUser, OfASocketThatNobodyHasIsNotRoot) {
  EXPECT_EQ(owner_in_table(kTable, at(0x1235), at(0x9c40)), std::nullopt);
}

TEST(PeerUser, IsFoundThroughIpv6) {
  EXPECT_EQ(owner_in_table(kTable6, at(0x1236), at(0x9c40)), 7u);  // mapped
  EXPECT_EQ(owner_in_table(kTable6, SocketAddress::loopback_v6(0x1237),
                           SocketAddress::loopback_v6(0x9c40)),
            8u);
}

TEST(PeerUser, OwnProcessesAreTrusted) {
  for (const SocketAddress& address :
       {SocketAddress::loopback_v4(), SocketAddress::loopback_v6()}) {
    const Socket listener = listen_tcp(address);
    const Socket client = connect_tcp(listener.local_address(), soon());
    // As long as it is in the queue of the listener nobody can tell who will take it.
    EXPECT_THAT(error_of([&] { require_trusted_peer(client); }).what(),
                HasSubstr("cannot be seen"));
    {
      const Socket server = accept(listener, soon());
      require_trusted_peer(server);
      require_trusted_peer(client);
    }
    EXPECT_EQ(error_of([&] { require_trusted_peer(client); }).code(), ErrorCode::kChannelClosed);
  }
}

TEST(PeerUser, IsToldByTheKernel) {
  for (const SocketAddress& address :
       {SocketAddress::loopback_v4(), SocketAddress::loopback_v6()}) {
    const Socket listener = listen_tcp(address);
    const SocketAddress there = listener.local_address();
    const Socket client = connect_tcp(there, soon());
    const SocketAddress here = client.local_address();
    if (!owner_by_kernel(here, there)) GTEST_SKIP() << "the kernel does not answer";
    EXPECT_EQ(owner_by_kernel(here, there), ::geteuid());
    EXPECT_EQ(owner_by_kernel(there, here), std::nullopt);  // not accepted yet
    const Socket server = accept(listener, soon());
    EXPECT_EQ(owner_by_kernel(there, here), ::geteuid());
    // Of the listener, which is at this port as well, nobody asked.
    EXPECT_EQ(owner_by_kernel(there, there), std::nullopt);
  }
}

TEST(PeerUser, AnotherUserOverLoopbackIsNot) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can run a process as another user";
  const Socket listener = listen_tcp(SocketAddress::loopback_v4());
  Socket caller;
  const OtherUser other([&] { caller = connect_tcp(listener.local_address(), soon()); });
  const Socket visitor = accept(listener, soon());
  EXPECT_THAT(owner_by_kernel(visitor.peer_address(), visitor.local_address()),
              AnyOf(std::optional<uid_t>(), std::optional<uid_t>(65534)));
  const Error error = error_of([&] { require_trusted_peer(visitor); });
  EXPECT_EQ(error.code(), ErrorCode::kAuthentication);
  EXPECT_THAT(error.what(), HasSubstr("runs as user 65534"));
}

}  // namespace
}  // namespace lockstep::peer_user_test

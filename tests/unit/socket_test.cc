#include "lockstep/net/socket/socket.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "tests/support/ranks.h"

namespace lockstep::socket_test {
namespace {

using ::testing::HasSubstr;
using namespace test;

std::vector<std::byte> pattern(std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 251);
  return bytes;
}

class Tcp : public ::testing::TestWithParam<int> {
 protected:
  SocketAddress loopback() const {
    return GetParam() == AF_INET ? SocketAddress::loopback_v4() : SocketAddress::loopback_v6();
  }
  std::pair<Socket, Socket> connected_pair() const {
    const Socket listener = listen_tcp(loopback());
    Socket client = connect_tcp(listener.local_address(), soon());
    return {std::move(client), accept(listener, soon())};
  }
};

INSTANTIATE_TEST_SUITE_P(Families, Tcp, ::testing::Values(AF_INET, AF_INET6),
                         [](const auto& family) { return family.param == AF_INET ? "v4" : "v6"; });

TEST_P(Tcp, CarriesMoreThanTheBuffersHold) {
  auto [client, server] = connected_pair();
  const auto sent = pattern(std::size_t{8} << 20);
  std::vector<std::byte> received(sent.size());
  std::thread sender([&, &from = client] { from.send_all(sent, soon()); });
  server.recv_all(received, soon());
  sender.join();
  EXPECT_TRUE(sent == received);
}

TEST_P(Tcp, DescriptorsDoNotSurviveExec) {
  auto [client, server] = connected_pair();
  for (const int fd : {client.fd(), server.fd()}) {
    EXPECT_TRUE(::fcntl(fd, F_GETFD) & FD_CLOEXEC);
    EXPECT_TRUE(::fcntl(fd, F_GETFL) & O_NONBLOCK);
  }
}

TEST_P(Tcp, ReceivingEndsAtTheDeadlineAndNamesThePeer) {
  auto [client, server] = connected_pair();
  client.set_peer("rank 3 (somewhere)", 3);
  std::byte byte;
  const Error error = error_of(
      [&, &socket = client] { socket.recv_all(std::span(&byte, 1), Deadline::after(10ms)); });
  EXPECT_EQ(error.code(), ErrorCode::kTimeout);
  EXPECT_EQ(error.rank(), 3);
  EXPECT_THAT(error.what(), HasSubstr("rank 3 (somewhere)"));
}

TEST_P(Tcp, SendingEndsAtTheDeadline) {
  auto [client, server] = connected_pair();
  const auto bytes = pattern(std::size_t{64} << 20);
  EXPECT_EQ(
      error_of([&, &socket = client] { socket.send_all(bytes, Deadline::after(50ms)); }).code(),
      ErrorCode::kTimeout);
}

TEST_P(Tcp, ATrippedLatchWakesAReceiver) {
  auto [client, server] = connected_pair();
  FailureLatch latch;
  std::thread other([&] { latch.trip(Error(ErrorCode::kAborted, "enough", 5)); });
  std::byte byte;
  const Error error =
      error_of([&, &socket = client] { socket.recv_all(std::span(&byte, 1), soon(), &latch); });
  other.join();
  EXPECT_EQ(error.code(), ErrorCode::kAborted);
  EXPECT_EQ(error.rank(), 5);
}

TEST_P(Tcp, AClosedPeerIsAClosedChannel) {
  auto [client, server] = connected_pair();
  server = Socket();
  std::byte byte;
  EXPECT_EQ(
      error_of([&, &socket = client] { socket.recv_all(std::span(&byte, 1), soon()); }).code(),
      ErrorCode::kChannelClosed);
}

TEST_P(Tcp, ClosingGentlyDeliversWhatWasSentDespiteUnreadBytes) {
  auto [client, server] = connected_pair();
  client.send_all(pattern(100000), soon());
  const auto sent = pattern(1000);
  server.send_all(sent, soon());
  server.close_gently();
  std::vector<std::byte> received(sent.size());
  client.recv_all(received, soon());
  EXPECT_TRUE(sent == received);
}

TEST_P(Tcp, AnAddressThatIsTakenIsIo) {
  const Socket first = listen_tcp(loopback());
  const Error error = error_of([&] { listen_tcp(first.local_address()); });
  EXPECT_EQ(error.code(), ErrorCode::kIo);
  EXPECT_THAT(error.what(), HasSubstr("in use"));
}

TEST_P(Tcp, ARefusedConnectionIsNoConnection) {
  const SocketAddress nobody = listen_tcp(loopback()).local_address();
  EXPECT_EQ(error_of([&] { connect_tcp(nobody, soon()); }).code(), ErrorCode::kNoConnection);
}

TEST_P(Tcp, RetryFindsAListenerThatComesLater) {
  const SocketAddress where = listen_tcp(loopback()).local_address();
  std::thread late([&] {
    const Socket listener = listen_tcp(where);
    accept(listener, soon());
  });
  const Socket client = connect_with_retry({where.host(), where.port()}, soon());
  late.join();
  EXPECT_EQ(client.peer_address(), where);
}

TEST_P(Tcp, RetryTellsTheLastCauseAtTheDeadline) {
  const SocketAddress nobody = listen_tcp(loopback()).local_address();
  const Error error = error_of([&] {
    connect_with_retry({nobody.host(), nobody.port()}, Deadline::after(50ms));
  });
  EXPECT_EQ(error.code(), ErrorCode::kTimeout);
  EXPECT_THAT(error.what(), HasSubstr(to_string(nobody)));
  EXPECT_THAT(error.what(), HasSubstr("refused"));
}

TEST_P(Tcp, NeverConnectsToItself) {
  // Call a port that the system hands out to callers: sooner or later it gives us that very port.
  const SocketAddress where = connected_pair().first.local_address();
  for (int i = 0; i < 40000; ++i) {
    ASSERT_THROW(connect_tcp(where, soon()), Error) << i;
  }
}

// The name is looked up for every attempt; the last of them has no time left.
TEST(Connect, ThatIsRefusedUntilTheDeadlineSaysSo) {
  const SocketAddress nobody = listen_tcp(SocketAddress::loopback_v4()).local_address();
  for (int round = 0; round < 20; ++round) {
    const Error error = error_of([&] {
      connect_with_retry({"localhost", nobody.port()}, Deadline::after(30ms));
    });
    EXPECT_THAT(error.what(), HasSubstr("refused"));
  }
}

TEST(TcpListener, OnAllInterfacesServesBothFamilies) {
  const Socket listener = listen_tcp(SocketAddress::any(AF_INET6));
  const std::uint16_t port = listener.local_address().port();
  for (const SocketAddress& address :
       {SocketAddress::loopback_v4(port), SocketAddress::loopback_v6(port)}) {
    const Socket client = connect_tcp(address, soon());
    EXPECT_TRUE(accept(listener, soon()).peer_address().is_loopback());
  }
}

TEST(TcpListener, AcceptEndsAtTheDeadline) {
  const Socket listener = listen_tcp(SocketAddress::loopback_v4());
  EXPECT_EQ(error_of([&] { accept(listener, Deadline::after(10ms)); }).code(), ErrorCode::kTimeout);
}

TEST(TcpListener, ATakenPortIsAnErrorThatNamesIt) {
  const Socket listener = listen_tcp(SocketAddress::loopback_v4());
  const SocketAddress where = listener.local_address();
  EXPECT_THAT(error_of([&] { listen_tcp(where); }).what(), HasSubstr(to_string(where)));
}

TEST(FailureLatch, TheFirstErrorWins) {
  FailureLatch latch;
  EXPECT_FALSE(latch.tripped());
  EXPECT_NO_THROW(latch.check());
  EXPECT_TRUE(latch.trip(Error(ErrorCode::kTimeout, "first", 1)));
  EXPECT_FALSE(latch.trip(Error(ErrorCode::kIo, "second", 2)));
  const Error error = error_of([&] { latch.check(); });
  EXPECT_EQ(error.code(), ErrorCode::kTimeout);
  EXPECT_EQ(error.rank(), 1);
  EXPECT_EQ(error.message(), "first");
}

}  // namespace
}  // namespace lockstep::socket_test

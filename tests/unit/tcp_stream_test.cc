#include "lockstep/comm/transport/tcp_stream.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/net/socket/unix_socket.h"

namespace lockstep::tcp_stream_test {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kMegabyte = 1 << 20;

std::pair<Socket, Socket> loopback_pair() {
  const Socket listener = listen_tcp(SocketAddress::loopback_v4());
  Socket one = connect_tcp(listener.local_address(), Deadline::after(20s));
  return {std::move(one), accept(listener, Deadline::after(20s))};
}

std::string congestion_control_of(int fd) {
  std::string name(16, '\0');
  auto size = static_cast<socklen_t>(name.size());
  EXPECT_EQ(::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), &size), 0);
  return name.substr(0, name.find('\0'));
}

TEST(TcpStream, LoopbackIsNotPacedAndTakesLongWrites) {
  auto [a, b] = loopback_pair();
  const int fd = a.fd();
  const int room = 2 * static_cast<int>(kMegabyte);
  ASSERT_EQ(::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof(room)), 0);
  TcpStream out(std::move(a), 20s);
  TcpStream in(std::move(b), 20s);
  EXPECT_EQ(congestion_control_of(fd), "reno");
  const std::vector<std::byte> sent(kMegabyte, std::byte{7});
  const std::vector<std::byte> head(64, std::byte{3});
  const std::size_t written = out.write_some(head, sent);
  EXPECT_GT(written, kMegabyte / 4);
  std::vector<std::byte> got_head(64);
  std::vector<std::byte> got(written - head.size());
  for (std::size_t read = 0; read < written;) {
    const std::size_t of_head = std::min(read, head.size());
    read +=
        in.read_some(std::span(got_head).subspan(of_head), std::span(got).subspan(read - of_head));
  }
  EXPECT_EQ(got_head, head);
  EXPECT_EQ(got, std::vector(got.size(), std::byte{7}));
}

TEST(TcpStream, OnlyOnAShortPathIsBbrReplaced) {
  EXPECT_EQ(congestion_control_for(true, 30us, "bbr"), "reno");
  EXPECT_EQ(congestion_control_for(false, 200us, "bbr"), "cubic");
  EXPECT_EQ(congestion_control_for(false, 200us, "bbr2"), "cubic");
  EXPECT_EQ(congestion_control_for(false, 20ms, "bbr"), "");
  EXPECT_EQ(congestion_control_for(false, 200us, "dctcp"), "");
  EXPECT_EQ(congestion_control_for(false, 200us, ""), "");
}

TEST(TcpStream, AConnectionToAnotherHostNearbyIsNotPaced) {
  const Socket listener = listen_tcp(SocketAddress::loopback_v4());
  Socket a = connect_tcp(listener.local_address(), Deadline::after(20s));
  const Socket other_end = accept(listener, Deadline::after(20s));
  const int fd = a.fd();
  const auto set = [](int socket, std::string_view name) {
    return ::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                        static_cast<socklen_t>(name.size())) == 0;
  };
  if (!set(fd, "cubic") || !set(fd, "bbr")) GTEST_SKIP() << "may not choose cubic and BBR here";
  a.protect(std::make_unique<Records>(std::nullopt));
  const TcpStream out(std::move(a), 20s);
  EXPECT_EQ(congestion_control_of(fd), "cubic");
}

TEST(TcpStream, OtherSocketsTakeShortWrites) {
  auto [a, b] = unix_socket_pair();
  TcpStream out(std::move(a), 20s);
  EXPECT_LE(out.write_some({}, std::vector<std::byte>(kMegabyte)), 64 * 1024U);
}

TEST(TcpStream, AConnectionThatIsGoneFailsInItsFirstUse) {
  auto [a, b] = loopback_pair();
  const linger at_once{1, 0};
  ASSERT_EQ(::setsockopt(b.fd(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once)), 0);
  { const Socket gone = std::move(b); }  // resets the connection
  TcpStream in(std::move(a), 20s);
  std::vector<std::byte> got(10);
  EXPECT_THROW(in.read_some({}, got), Error);
}

}  // namespace
}  // namespace lockstep::tcp_stream_test

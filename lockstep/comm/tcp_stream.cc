#include "lockstep/comm/tcp_stream.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

// One write becomes one packet train on loopback only if it fits a segment of the largest MTU
// (64 KiB); anything longer leaves a tiny packet behind every time, at half the rate.
constexpr std::size_t kWriteBytes = 60 * 1024;

std::array<iovec, 2> parts_of(std::span<const std::byte> head, std::span<const std::byte> body) {
  return {iovec{const_cast<std::byte*>(head.data()), head.size()},
          iovec{const_cast<std::byte*>(body.data()), body.size()}};
}

// 0 if the call would have had to wait; throws otherwise.
std::size_t nothing_moved(const char* operation) {
  switch (errno) {
    case EAGAIN:
    case EINTR: return 0;
    case ECONNRESET:
    case EPIPE: throw Error(ErrorCode::kChannelClosed, "the connection was reset");
    case ETIMEDOUT: throw Error(ErrorCode::kPeerLost, "the network no longer reaches it");
    default: throw_io(operation, errno);
  }
}

}  // namespace

std::size_t TcpStream::write_some(std::span<const std::byte> head,
                                  std::span<const std::byte> body) {
  auto parts = parts_of(head, body.first(std::min(body.size(), kWriteBytes)));
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  const ssize_t n = ::sendmsg(socket_.fd(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  return n >= 0 ? static_cast<std::size_t>(n) : nothing_moved("sendmsg");
}

std::size_t TcpStream::read_some(std::span<std::byte> head, std::span<std::byte> body) {
  auto parts = parts_of(head, body);
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  const ssize_t n = ::recvmsg(socket_.fd(), &message, MSG_DONTWAIT);
  if (n == 0 && head.size() + body.size() > 0) {
    throw Error(ErrorCode::kChannelClosed, "it closed the connection");
  }
  return n >= 0 ? static_cast<std::size_t>(n) : nothing_moved("recvmsg");
}

bool TcpStream::prepare_wait(Direction direction, std::vector<pollfd>& fds) {
  const short events = direction == Direction::kRecv ? POLLIN : POLLOUT;
  fds.push_back({socket_.fd(), events, 0});
  return true;
}

}  // namespace lockstep

#include "lockstep/comm/transport/tcp_stream.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <optional>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

// Under BBR a longer write can be slower, so this is the most where the system chooses the
// congestion control. See docs/decisions/tcp_writes.md.
constexpr std::size_t kWriteBytes = 60 * 1024;

// A path with a shorter round trip stays within a data centre.
constexpr std::chrono::milliseconds kShortPath{1};

// So many bytes are written between two looks at what the link takes.
constexpr std::size_t kLookEvery = 512 * 1024;

// Up to this, one copy is cheaper than having the system walk two parts.
constexpr std::size_t kJoinBytes = 1024;

// The longest name of a congestion control, as the kernel has it.
constexpr std::size_t kControlName = 16;

std::array<iovec, 2> parts_of(std::span<const std::byte> head, std::span<const std::byte> body) {
  return {iovec{const_cast<std::byte*>(head.data()), head.size()},
          iovec{const_cast<std::byte*>(body.data()), body.size()}};
}

bool is_on_one_host(const Socket& socket) {
  try {
    return socket.local_address().host() == socket.peer_address().host();
  } catch (const Error&) {
    return false;  // a connection that is gone already fails in its first use
  }
}

// What an older system does not tell is zero. Nothing: the connection is gone.
std::optional<tcp_info> info_of(const Socket& socket) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (::getsockopt(socket.fd(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return std::nullopt;
  return info;
}

std::chrono::microseconds round_trip_of(const Socket& socket) {
  using std::chrono::microseconds;
  const auto info = info_of(socket);
  return info ? microseconds(info->tcpi_rtt) : microseconds::max();
}

std::string control_of(const Socket& socket) {
  std::array<char, kControlName> name{};
  auto size = static_cast<socklen_t>(name.size());
  if (::getsockopt(socket.fd(), IPPROTO_TCP, TCP_CONGESTION, name.data(), &size) != 0) return {};
  return {name.data(), ::strnlen(name.data(), name.size())};
}

// Whether the connection now has it: a user may not be allowed to choose it.
bool set_control(const Socket& socket, std::string_view name) {
  return ::setsockopt(socket.fd(), IPPROTO_TCP, TCP_CONGESTION, name.data(),
                      static_cast<socklen_t>(name.size())) == 0;
}

// Chooses the congestion control; returns the most bytes of a write.
std::size_t prepare_writes(const Socket& socket) {
  const bool on_one_host = socket.records() == nullptr && is_on_one_host(socket);
  const std::string_view control =
      congestion_control_for(on_one_host, round_trip_of(socket), control_of(socket));
  const bool chosen = !control.empty() && set_control(socket, control);
  return on_one_host && chosen ? std::numeric_limits<std::size_t>::max() : kWriteBytes;
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

std::string_view congestion_control_for(bool on_one_host, std::chrono::microseconds round_trip,
                                        std::string_view of_system) {
  if (on_one_host) return "reno";
  return of_system.starts_with("bbr") && round_trip < kShortPath ? "cubic" : "";
}

TcpStream::TcpStream(Socket socket, Deadline::Clock::duration timeout, WireCompression compression,
                     int connections)
    : socket_(std::move(socket)),
      timeout_(timeout),
      most_at_once_(prepare_writes(socket_)),
      measures_link_(socket_.records() != nullptr && compression == WireCompression::kAuto),
      gauge_(connections) {
  if (socket_.records() != nullptr) {
    socket_.records()->sealer.set_compression(compression == WireCompression::kOn);
  }
}

std::size_t TcpStream::write_some(std::span<const std::byte> head,
                                  std::span<const std::byte> body) {
  if (socket_.records() != nullptr) return write_records(head, body);
  if (head.size() + body.size() <= kJoinBytes) {
    std::array<std::byte, kJoinBytes> joined;
    std::copy(head.begin(), head.end(), joined.begin());
    std::copy(body.begin(), body.end(), joined.begin() + head.size());
    const ssize_t n =
        ::send(socket_.fd(), joined.data(), head.size() + body.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    return n >= 0 ? static_cast<std::size_t>(n) : nothing_moved("send");
  }
  auto parts = parts_of(head, body.first(std::min(body.size(), most_at_once_)));
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  const ssize_t n = ::sendmsg(socket_.fd(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  return n >= 0 ? static_cast<std::size_t>(n) : nothing_moved("sendmsg");
}

std::size_t TcpStream::read_some(std::span<std::byte> head, std::span<std::byte> body) {
  if (socket_.records() != nullptr) return read_records(head, body);
  const std::size_t wanted = head.size() + body.size();
  std::array<std::byte, kJoinBytes> joined;
  const bool join = wanted <= kJoinBytes;
  ssize_t n = 0;
  if (join) {
    n = ::recv(socket_.fd(), joined.data(), wanted, MSG_DONTWAIT);
  } else {
    auto parts = parts_of(head, body);
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    n = ::recvmsg(socket_.fd(), &message, MSG_DONTWAIT);
  }
  if (n < 0) return nothing_moved("receiving");
  if (n == 0 && wanted > 0) throw Error(ErrorCode::kChannelClosed, "it closed the connection");
  const auto got = static_cast<std::size_t>(n);
  if (join) {
    const std::size_t in_head = std::min(got, head.size());
    std::copy_n(joined.begin(), in_head, head.begin());
    std::copy_n(joined.begin() + in_head, got - in_head, body.begin());
  }
  return got;
}

// Bytes count as written when their records are sent whole. Until then the caller, who has to write
// them, comes with the same bytes.
std::size_t TcpStream::write_records(std::span<const std::byte> head,
                                     std::span<const std::byte> body) {
  RecordSealer& sealer = socket_.records()->sealer;
  if (sealer.unsent().empty()) sealer.seal(head, body);
  while (!sealer.unsent().empty()) {
    const std::span<const std::byte> unsent = sealer.unsent();
    const ssize_t n =
        ::send(socket_.fd(), unsent.data(), unsent.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0) return nothing_moved("send");
    sealer.sent(static_cast<std::size_t>(n));
    written_since_look_ += static_cast<std::size_t>(n);
  }
  if (measures_link_ && written_since_look_ >= kLookEvery) look_at_link();
  return sealer.take_done();
}

void TcpStream::look_at_link() {
  written_since_look_ = 0;
  const auto info = info_of(socket_);
  if (!info) return;
  using std::chrono::microseconds;
  RecordSealer& sealer = socket_.records()->sealer;
  const CompressionCost cost = sealer.take_cost();
  gauge_.add_cost(cost.bytes, cost.time);
  gauge_.look({info->tcpi_bytes_acked, microseconds(info->tcpi_busy_time),
               microseconds(info->tcpi_rwnd_limited), info->tcpi_notsent_bytes});
  sealer.set_compression(gauge_.pays());
}

std::size_t TcpStream::read_records(std::span<std::byte> head, std::span<std::byte> body) {
  RecordOpener& opener = socket_.records()->opener;
  if (const std::size_t opened = opener.open(head, body); opened > 0) return opened;
  if (head.empty() && body.empty()) return 0;
  const std::span<std::byte> room = opener.room();
  const ssize_t n = ::recv(socket_.fd(), room.data(), room.size(), MSG_DONTWAIT);
  if (n < 0) return nothing_moved("receiving");
  if (n == 0) throw Error(ErrorCode::kChannelClosed, "it closed the connection");
  opener.received(static_cast<std::size_t>(n));
  return opener.open(head, body);
}

bool TcpStream::prepare_wait(Direction direction, std::vector<pollfd>& fds) {
  const short events = direction == Direction::kRecv ? POLLIN : POLLOUT;
  fds.push_back({socket_.fd(), events, 0});
  return direction == Direction::kSend || !socket_.buffered();
}

void TcpStream::check_reach() {
  const auto info = info_of(socket_);
  if (!info) return;
  const std::lock_guard lock(mutex_);
  const auto now = Deadline::Clock::now();
  // What a full receiver keeps us from sending is not under way.
  const bool under_way = info->tcpi_unacked > 0;
  if (!under_way || info->tcpi_bytes_acked != acknowledged_) {
    acknowledged_ = info->tcpi_bytes_acked;
    unanswered_since_ = under_way ? now : Deadline::Clock::time_point{};
  } else if (unanswered_since_ == Deadline::Clock::time_point{}) {
    unanswered_since_ = now;
  } else if (now - unanswered_since_ >= timeout_) {
    throw Error(ErrorCode::kPeerLost, "the network no longer reaches it");
  }
}

}  // namespace lockstep

#include "lockstep/net/socket/socket.h"

#include <fmt/format.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace lockstep {
namespace {

using std::chrono::milliseconds;

std::string error_text(int error_number) { return std::generic_category().message(error_number); }

bool is_closed(int error_number) {
  return error_number == ECONNRESET || error_number == EPIPE || error_number == ENOTCONN;
}

// Errors of an attempt to connect that another attempt may not meet.
bool is_unreachable(int error_number) {
  switch (error_number) {
    case ECONNREFUSED:
    case ECONNRESET:
    case ECONNABORTED:
    case EHOSTUNREACH:
    case EHOSTDOWN:
    case ENETUNREACH:
    case ENETDOWN:
    case ETIMEDOUT:
    case EADDRNOTAVAIL:  // no local address of this family, or no free port
    case EAFNOSUPPORT: return true;
    default: return false;
  }
}

[[noreturn]] void throw_unreachable(const SocketAddress& address, int error_number) {
  const ErrorCode code = is_unreachable(error_number) ? ErrorCode::kNoConnection : ErrorCode::kIo;
  throw Error(code,
              fmt::format("connecting to {}: {}", to_string(address), error_text(error_number)));
}

[[noreturn]] void throw_transfer(const Socket& socket, std::string_view verb, int error_number) {
  if (is_closed(error_number)) {
    throw Error(ErrorCode::kChannelClosed,
                fmt::format("{} {}: {}", verb, socket.peer(), error_text(error_number)),
                socket.peer_rank());
  }
  // Keepalive or TCP_USER_TIMEOUT gave up, or there is no way any more.
  if (is_unreachable(error_number)) {
    throw Error(ErrorCode::kPeerLost,
                fmt::format("{} {}: it no longer answers", verb, socket.peer()),
                socket.peer_rank());
  }
  throw_io(fmt::format("{} {}", verb, socket.peer()), error_number);
}

Descriptor open_tcp(int family) {
  Descriptor descriptor(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!descriptor) throw_io("opening a TCP socket", errno);
  return descriptor;
}

void set_option(int fd, int level, int name, int value, std::string_view what) {
  if (::setsockopt(fd, level, name, &value, sizeof(value)) != 0) throw_io(what, errno);
}

SocketAddress address_of(int fd, int (*query)(int, sockaddr*, socklen_t*), std::string_view what) {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  if (query(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) throw_io(what, errno);
  return {reinterpret_cast<const sockaddr*>(&storage), size};
}

}  // namespace

Socket::Socket(Descriptor descriptor, std::string peer, int peer_rank)
    : descriptor_(std::move(descriptor)), peer_(std::move(peer)), peer_rank_(peer_rank) {}

void Socket::set_peer(std::string name, int rank) {
  peer_ = std::move(name);
  peer_rank_ = rank;
}

std::optional<std::size_t> Socket::try_send(std::span<const std::byte> bytes) const {
  if (bytes.empty()) return 0;
  if (!records_) return try_send_raw(bytes);
  RecordSealer& sealer = records_->sealer;
  if (sealer.unsent().empty()) sealer.seal({}, bytes);
  while (!sealer.unsent().empty()) {
    const auto sent = try_send_raw(sealer.unsent());
    if (!sent) return std::nullopt;
    sealer.sent(*sent);
  }
  return sealer.take_done();
}

std::optional<std::size_t> Socket::try_send_raw(std::span<const std::byte> bytes) const {
  while (true) {
    const ssize_t sent = ::send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) return static_cast<std::size_t>(sent);
    if (errno == EAGAIN || errno == EWOULDBLOCK) return std::nullopt;
    if (errno != EINTR) throw_transfer(*this, "sending to", errno);
  }
}

void Socket::send_if_heard(std::span<const std::byte> bytes) const noexcept {
  try {
    try_send(bytes);
  } catch (const Error&) {
  }
}

std::optional<std::size_t> Socket::try_recv(std::span<std::byte> bytes) const {
  if (bytes.empty()) return 0;
  if (!records_) return try_recv_raw(bytes);
  while (true) {
    if (const std::size_t opened = open_records(bytes); opened > 0) return opened;
    const auto received = try_recv_raw(records_->opener.room());
    if (!received) return std::nullopt;
    records_->opener.received(*received);
  }
}

std::size_t Socket::open_records(std::span<std::byte> bytes) const {
  try {
    return records_->opener.open({}, bytes);
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("receiving from {}: {}", peer_, error.message()),
                peer_rank_);
  }
}

std::optional<std::size_t> Socket::try_recv_raw(std::span<std::byte> bytes) const {
  while (true) {
    const ssize_t received = ::recv(fd(), bytes.data(), bytes.size(), 0);
    if (received > 0) return static_cast<std::size_t>(received);
    if (received == 0) {
      throw Error(ErrorCode::kChannelClosed,
                  fmt::format("receiving from {}: it closed the connection", peer_), peer_rank_);
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return std::nullopt;
    if (errno != EINTR) throw_transfer(*this, "receiving from", errno);
  }
}

void Socket::send_all(std::span<const std::byte> bytes, Deadline deadline,
                      const FailureLatch* latch) const {
  while (!bytes.empty()) {
    if (const auto sent = try_send(bytes)) {
      bytes = bytes.subspan(*sent);
    } else {
      wait_for(fd(), POLLOUT, deadline, latch, fmt::format("sending to {}", peer_), peer_rank_);
    }
  }
}

void Socket::recv_all(std::span<std::byte> bytes, Deadline deadline,
                      const FailureLatch* latch) const {
  while (!bytes.empty()) {
    if (const auto received = try_recv(bytes)) {
      bytes = bytes.subspan(*received);
    } else {
      wait_for(fd(), POLLIN, deadline, latch, fmt::format("receiving from {}", peer_), peer_rank_);
    }
  }
}

SocketAddress Socket::local_address() const {
  return address_of(fd(), ::getsockname, "asking for a socket's own address");
}

SocketAddress Socket::peer_address() const {
  return address_of(fd(), ::getpeername, "asking for a socket's peer");
}

void Socket::close_gently() {
  if (!descriptor_) return;
  ::shutdown(fd(), SHUT_WR);
  // Bounded: a peer that keeps sending must not hold us here.
  std::byte scratch[4096];
  for (int i = 0; i < 256 && ::recv(fd(), scratch, sizeof(scratch), 0) > 0; ++i) {
  }
  descriptor_.reset();
}

void wait_for(int fd, short events, Deadline deadline, const FailureLatch* latch,
              std::string_view what, int rank) {
  pollfd entries[2] = {{fd, events, 0}, {latch != nullptr ? latch->fd() : -1, POLLIN, 0}};
  while (true) {
    if (latch != nullptr) latch->check();
    const int ready = ::poll(entries, 2, deadline.poll_timeout());
    if (ready < 0 && errno != EINTR) throw_io(what, errno);
    if (latch != nullptr) latch->check();
    if (ready > 0) return;
    if (deadline.expired()) throw Error(ErrorCode::kTimeout, std::string(what), rank);
  }
}

Socket listen_tcp(const SocketAddress& address) {
  Descriptor descriptor = open_tcp(address.family());
  const std::string what = fmt::format("listening on {}", to_string(address));
  // A port of a job that just ended can be used again at once.
  set_option(descriptor.get(), SOL_SOCKET, SO_REUSEADDR, 1, what);
  if (address.family() == AF_INET6) {
    set_option(descriptor.get(), IPPROTO_IPV6, IPV6_V6ONLY, address.is_any() ? 0 : 1, what);
  }
  if (::bind(descriptor.get(), address.data(), address.size()) != 0) throw_io(what, errno);
  if (::listen(descriptor.get(), SOMAXCONN) != 0) throw_io(what, errno);
  return Socket(std::move(descriptor), "nobody: this socket listens");
}

std::optional<Socket> try_accept(const Socket& listener) {
  while (true) {
    sockaddr_storage storage{};
    socklen_t size = sizeof(storage);
    Descriptor descriptor(::accept4(listener.fd(), reinterpret_cast<sockaddr*>(&storage), &size,
                                    SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (descriptor) {
      const bool tcp = storage.ss_family == AF_INET || storage.ss_family == AF_INET6;
      if (!tcp) return Socket(std::move(descriptor), "a process of this host");
      const SocketAddress peer(reinterpret_cast<const sockaddr*>(&storage), size);
      Socket socket(std::move(descriptor), to_string(peer));
      tune_tcp(socket, {});
      return socket;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return std::nullopt;
    // accept() also reports what befell a connection before we took it; that is not ours to mind.
    if (errno != EINTR && errno != EPROTO && !is_unreachable(errno)) throw_io("accepting", errno);
  }
}

Socket accept(const Socket& listener, Deadline deadline, const FailureLatch* latch) {
  while (true) {
    if (auto socket = try_accept(listener)) return std::move(*socket);
    wait_for(listener.fd(), POLLIN, deadline, latch, "waiting for a connection");
  }
}

Socket connect_tcp(const SocketAddress& address, Deadline deadline, const FailureLatch* latch) {
  Socket socket(open_tcp(address.family()), to_string(address));
  if (::connect(socket.fd(), address.data(), address.size()) != 0) {
    if (errno != EINPROGRESS && errno != EINTR) throw_unreachable(address, errno);
    wait_for(socket.fd(), POLLOUT, deadline, latch,
             fmt::format("connecting to {}", to_string(address)));
    int error_number = 0;
    socklen_t size = sizeof(error_number);
    ::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error_number, &size);
    if (error_number != 0) throw_unreachable(address, error_number);
  }
  // On loopback the system may choose as our own port the very one we call, and connect us to
  // ourselves. Let go with a reset, so that the port is free for its owner.
  if (socket.local_address() == address) {
    const linger reset{1, 0};
    ::setsockopt(socket.fd(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    throw_unreachable(address, ECONNREFUSED);
  }
  tune_tcp(socket, {});
  return socket;
}

Socket connect_with_retry(const HostPort& where, Deadline deadline, const FailureLatch* latch) {
  std::optional<std::string> cause;
  // An attempt that the deadline cuts short says less than one before it.
  const auto note = [&](const Error& error) {
    if (!cause || error.code() != ErrorCode::kTimeout || !deadline.expired()) {
      cause = error.message();
    }
  };
  // A black hole among several addresses must not use up all the time.
  constexpr auto kOneAttempt = std::chrono::seconds(5);
  constexpr milliseconds kLongestPause{200};
  for (milliseconds pause{5};; pause = std::min(pause * 2, kLongestPause)) {
    try {
      for (const SocketAddress& address : resolve(where, deadline)) {
        try {
          return connect_tcp(address, earlier(deadline, Deadline::after(kOneAttempt)), latch);
        } catch (const Error& error) {
          if (latch != nullptr) latch->check();
          if (error.code() != ErrorCode::kNoConnection && error.code() != ErrorCode::kTimeout)
            throw;
          note(error);
        }
      }
    } catch (const Error& error) {
      if (latch != nullptr) latch->check();
      if (error.code() != ErrorCode::kNoConnection && error.code() != ErrorCode::kTimeout) throw;
      note(error);
    }
    if (deadline.expired()) {
      throw Error(ErrorCode::kTimeout, fmt::format("no connection to {}; last attempt: {}",
                                                   to_string(where), cause.value_or("none")));
    }
    pollfd entry{latch != nullptr ? latch->fd() : -1, POLLIN, 0};
    ::poll(&entry, 1, deadline.poll_timeout(pause));
    if (latch != nullptr) latch->check();
  }
}

void tune_tcp(const Socket& socket, Deadline::Clock::duration timeout) {
  const int fd = socket.fd();
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1, "setting TCP_NODELAY");
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1, "setting SO_KEEPALIVE");
  if (timeout <= Deadline::Clock::duration::zero()) return;
  const auto limit = std::min<Deadline::Clock::duration>(timeout, std::chrono::hours(24));
  // Probes find a silent peer that we send nothing to; whole seconds is what the system offers.
  const int interval = static_cast<int>(std::max<std::int64_t>(
      1, std::chrono::duration_cast<std::chrono::seconds>(limit).count() / 4));
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, interval, "setting TCP_KEEPIDLE");
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, interval, "setting TCP_KEEPINTVL");
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 4, "setting TCP_KEEPCNT");
}

}  // namespace lockstep

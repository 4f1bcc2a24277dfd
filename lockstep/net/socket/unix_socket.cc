#include "lockstep/net/socket/unix_socket.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "lockstep/base/check.h"
#include "lockstep/net/socket/peer_user.h"

namespace lockstep {
namespace {

struct UnixAddress {
  sockaddr_un address{};
  socklen_t size = 0;

  explicit UnixAddress(const std::string& name) {
    // A leading zero byte makes the name abstract.
    if (name.empty() || name.size() > sizeof(address.sun_path) - 1) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("a unix socket's name has 1 to {} bytes, not {}",
                              sizeof(address.sun_path) - 1, name.size()));
    }
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  const sockaddr* data() const { return reinterpret_cast<const sockaddr*>(&address); }
};

Descriptor open_unix() {
  Descriptor descriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!descriptor) throw_io("opening a unix socket", errno);
  return descriptor;
}

// One byte of data with room for descriptors beside it.
struct DescriptorMessage {
  std::byte token{};
  iovec data{&token, 1};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control{};
  msghdr header{};

  explicit DescriptorMessage(std::size_t control_size) {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control_size;
  }
};

}  // namespace

Socket listen_unix(const std::string& name) {
  const UnixAddress address(name);
  Descriptor descriptor = open_unix();
  const std::string what = fmt::format("listening on unix socket {}", name);
  if (::bind(descriptor.get(), address.data(), address.size) != 0) throw_io(what, errno);
  if (::listen(descriptor.get(), SOMAXCONN) != 0) throw_io(what, errno);
  return Socket(std::move(descriptor), "nobody: this socket listens");
}

Socket connect_unix(const std::string& name, Deadline deadline, const FailureLatch* latch) {
  const UnixAddress address(name);
  const std::string what = fmt::format("connecting to unix socket {}", name);
  Socket socket(open_unix(), fmt::format("unix socket {}", name));
  while (::connect(socket.fd(), address.data(), address.size) != 0) {
    if (errno == EINTR) continue;
    if (errno == ECONNREFUSED) {
      throw Error(ErrorCode::kNoConnection, fmt::format("{}: nobody listens", what));
    }
    if (errno != EAGAIN) throw_io(what, errno);
    // The listener's queue is full, and nothing can be polled for; look again in a moment.
    if (deadline.expired()) throw Error(ErrorCode::kTimeout, what);
    pollfd entry{latch != nullptr ? latch->fd() : -1, POLLIN, 0};
    ::poll(&entry, 1, deadline.poll_timeout(std::chrono::milliseconds(5)));
    if (latch != nullptr) latch->check();
  }
  require_trusted_peer(socket);
  return socket;
}

std::pair<Socket, Socket> unix_socket_pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0) {
    throw_io("opening a pair of unix sockets", errno);
  }
  return {Socket(Descriptor(fds[0]), "this process"), Socket(Descriptor(fds[1]), "this process")};
}

void send_descriptors(const Socket& socket, std::span<const int> descriptors, Deadline deadline,
                      const FailureLatch* latch) {
  LOCKSTEP_CHECK(!descriptors.empty() && descriptors.size() <= kMaxDescriptors);
  DescriptorMessage message(CMSG_SPACE(descriptors.size_bytes()));
  cmsghdr* control = CMSG_FIRSTHDR(&message.header);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(descriptors.size_bytes());
  std::memcpy(CMSG_DATA(control), descriptors.data(), descriptors.size_bytes());

  const std::string what = fmt::format("sending descriptors to {}", socket.peer());
  while (::sendmsg(socket.fd(), &message.header, MSG_NOSIGNAL) < 0) {
    if (errno == EPIPE || errno == ECONNRESET) {
      throw Error(ErrorCode::kChannelClosed, what, socket.peer_rank());
    }
    if (errno == EAGAIN) {
      wait_for(socket.fd(), POLLOUT, deadline, latch, what, socket.peer_rank());
    } else if (errno != EINTR) {
      throw_io(what, errno);
    }
  }
}

std::vector<Descriptor> receive_descriptors(const Socket& socket, std::size_t count,
                                            Deadline deadline, const FailureLatch* latch) {
  LOCKSTEP_CHECK(count > 0 && count <= kMaxDescriptors);
  const std::string what = fmt::format("receiving descriptors from {}", socket.peer());
  DescriptorMessage message(sizeof(message.control));
  ssize_t received;
  while ((received = ::recvmsg(socket.fd(), &message.header, MSG_CMSG_CLOEXEC)) < 0) {
    if (errno == ECONNRESET) throw Error(ErrorCode::kChannelClosed, what, socket.peer_rank());
    if (errno == EAGAIN) {
      wait_for(socket.fd(), POLLIN, deadline, latch, what, socket.peer_rank());
    } else if (errno != EINTR) {
      throw_io(what, errno);
    }
  }
  if (received == 0) throw Error(ErrorCode::kChannelClosed, what, socket.peer_rank());

  // Own whatever came before judging it, so that nothing leaks.
  std::vector<Descriptor> descriptors;
  for (cmsghdr* control = CMSG_FIRSTHDR(&message.header); control != nullptr;
       control = CMSG_NXTHDR(&message.header, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t arrived = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < arrived; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(control) + i * sizeof(int), sizeof(fd));
      descriptors.emplace_back(fd);
    }
  }
  const bool cut = (message.header.msg_flags & MSG_CTRUNC) != 0;
  if (cut && descriptors.size() < count) throw_io(what, EMFILE);  // this process may have no more
  if (descriptors.size() != count || cut) {
    throw Error(ErrorCode::kUnexpectedMessage,
                fmt::format("{}: expected {}, got {}", what, count, descriptors.size()),
                socket.peer_rank());
  }
  return descriptors;
}

}  // namespace lockstep

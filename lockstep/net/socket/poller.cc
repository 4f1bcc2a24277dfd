#include "lockstep/net/socket/poller.h"

#include <cerrno>

#include "lockstep/base/error.h"

namespace lockstep {

Poller::Poller() : descriptor_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!descriptor_) throw_io("epoll_create1", errno);
}

void Poller::control(int operation, int fd, std::uint64_t key, bool sending) {
  epoll_event event{};
  event.events = sending ? EPOLLIN | EPOLLOUT : EPOLLIN;
  event.data.u64 = key;
  if (::epoll_ctl(descriptor_.get(), operation, fd, &event) != 0) throw_io("epoll_ctl", errno);
}

void Poller::add(int fd, std::uint64_t key, bool sending) {
  control(EPOLL_CTL_ADD, fd, key, sending);
}

void Poller::set_sending(int fd, std::uint64_t key, bool sending) {
  control(EPOLL_CTL_MOD, fd, key, sending);
}

void Poller::remove(int fd) { control(EPOLL_CTL_DEL, fd, 0, false); }

std::span<const std::uint64_t> Poller::wait(Deadline deadline) {
  const int count = ::epoll_wait(descriptor_.get(), events_.data(),
                                 static_cast<int>(events_.size()), deadline.poll_timeout());
  if (count < 0) {
    if (errno != EINTR) throw_io("epoll_wait", errno);
    return {};
  }
  for (int i = 0; i < count; ++i) {
    keys_[static_cast<std::size_t>(i)] = events_[static_cast<std::size_t>(i)].data.u64;
  }
  return std::span(keys_).first(static_cast<std::size_t>(count));
}

}  // namespace lockstep

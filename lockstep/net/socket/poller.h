#pragma once

#include <sys/epoll.h>

#include <array>
#include <cstdint>
#include <span>

#include "lockstep/base/deadline.h"
#include "lockstep/base/descriptor.h"

namespace lockstep {

// Tells which of many descriptors are ready, at a cost that does not grow with those that are not
// (epoll). Used by one thread. Calls throw Error{kIo}.
class Poller {
 public:
  Poller();

  // Readable while a descriptor is ready, so that pollers nest.
  int fd() const { return descriptor_.get(); }

  // From now on wait() returns `key` when `fd` can be read or has ended and, with `sending`, when
  // it can be written to.
  void add(int fd, std::uint64_t key, bool sending = false);
  void set_sending(int fd, std::uint64_t key, bool sending);
  // Before the descriptor goes to somebody else; closing it removes it, too.
  void remove(int fd);

  // The keys of some that are ready; empty at the deadline. Valid until the next call.
  std::span<const std::uint64_t> wait(Deadline deadline);

 private:
  void control(int operation, int fd, std::uint64_t key, bool sending);

  Descriptor descriptor_;
  std::array<epoll_event, 128> events_{};
  std::array<std::uint64_t, 128> keys_{};
};

}  // namespace lockstep

#include "lockstep/base/event.h"

#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"

namespace lockstep {

Event::Event() : descriptor_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!descriptor_) throw_io("eventfd", errno);
}

void Event::set() const {
  // Fails only when the counter is near 2^64.
  const std::uint64_t one = 1;
  LOCKSTEP_CHECK(::write(fd(), &one, sizeof(one)) == sizeof(one));
}

void Event::clear() const {
  std::uint64_t count;
  [[maybe_unused]] const ssize_t size = ::read(fd(), &count, sizeof(count));
}

}  // namespace lockstep

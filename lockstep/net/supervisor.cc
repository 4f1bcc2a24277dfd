#include "lockstep/net/supervisor.h"

#include <sys/eventfd.h>

#include <cerrno>

#include "lockstep/base/check.h"

namespace lockstep {

FailureLatch::FailureLatch() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) throw_io("eventfd", errno);
}

bool FailureLatch::trip(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (error_) return false;
  error_ = error;
  tripped_.store(true, std::memory_order_release);
  // The first write to an eventfd cannot fail: its counter is zero.
  const std::uint64_t one = 1;
  LOCKSTEP_CHECK(::write(event_.get(), &one, sizeof(one)) == sizeof(one));
  return true;
}

std::optional<Error> FailureLatch::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void FailureLatch::rethrow() const { throw Error(*error()); }

}  // namespace lockstep

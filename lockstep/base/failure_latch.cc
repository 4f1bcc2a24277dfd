#include "lockstep/base/failure_latch.h"

namespace lockstep {

bool FailureLatch::trip(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (error_) return false;
  error_ = error;
  tripped_.store(true, std::memory_order_release);
  event_.set();
  return true;
}

std::optional<Error> FailureLatch::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void FailureLatch::rethrow() const { throw Error(*error()); }

}  // namespace lockstep

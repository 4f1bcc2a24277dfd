#pragma once

#include <atomic>
#include <mutex>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/event.h"

namespace lockstep {

// The error that ended a job: set once, seen by every thread, never cleared. Thread-safe.
class FailureLatch {
 public:
  bool tripped() const noexcept { return tripped_.load(std::memory_order_acquire); }
  // The first error wins. Returns whether this one is the first.
  bool trip(const Error& error);
  std::optional<Error> error() const;
  // Throws the error if there is one.
  void check() const {
    if (tripped()) [[unlikely]]
      rethrow();
  }
  // Readable from the moment the latch trips, for poll(). Never read it.
  int fd() const { return event_.fd(); }

 private:
  [[noreturn]] void rethrow() const;

  const Event event_;
  std::atomic<bool> tripped_{false};
  mutable std::mutex mutex_;
  std::optional<Error> error_;  // guarded by mutex_
};

}  // namespace lockstep

#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "lockstep/base/descriptor.h"
#include "lockstep/base/error.h"

namespace lockstep {

// The sticky error of a job: set once, seen by every thread, never cleared. Thread-safe.
class FailureLatch {
 public:
  FailureLatch();

  bool tripped() const noexcept { return tripped_.load(std::memory_order_acquire); }
  // The first error wins; returns whether this one did.
  bool trip(const Error& error);
  std::optional<Error> error() const;
  // Throws the error if there is one.
  void check() const {
    if (tripped()) [[unlikely]]
      rethrow();
  }
  // Readable from the moment the latch trips, for poll(). Never read it.
  int fd() const { return event_.get(); }

 private:
  [[noreturn]] void rethrow() const;

  Descriptor event_;  // constant after construction
  std::atomic<bool> tripped_{false};
  mutable std::mutex mutex_;
  std::optional<Error> error_;  // guarded by mutex_
};

// What a rank is doing, as told to the others: which collective it entered last.
struct Progress {
  std::uint32_t channel = 0;   // which communicator
  std::uint64_t sequence = 0;  // how many collectives it has entered there
  bool inside = false;         // still in that collective, or done with it
  std::string description;     // "all_reduce sum f32 x 1000 (tree)"

  bool operator==(const Progress&) const = default;
};

// How a transport learns that the job has failed, and tells it. Thread-safe.
class Supervisor {
 public:
  virtual ~Supervisor() = default;

  virtual FailureLatch& latch() = 0;

  // Reports a failure as seen from this rank, waits (briefly, bounded) until the job has agreed on
  // its first cause, trips the latch with that cause and throws it.
  [[noreturn]] virtual void fail(const Error& seen) = 0;

  // Ends the job on every rank at once. Does not block on peers.
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace lockstep

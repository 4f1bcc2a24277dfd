#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/failure_latch.h"
#include "lockstep/wire/control_messages.h"

namespace lockstep {

// What all communicators of a rank are doing. Thread-safe.
class ProgressBook {
 public:
  // Tells the collective that one communicator entered last, then the earlier ones that it still
  // remembers. From the earlier ones a rank that hangs in a collective learns how the other ranks
  // called it before they went on.
  using Source = std::function<std::vector<Progress>()>;

  void add(const void* owner, Source source);
  // When this returns, the source is not running and will not be called again. Its last collective
  // is still told, until many other communicators have ended.
  void remove(const void* owner);
  // First the communicators that live, then those that ended, the latest first.
  std::vector<Progress> all() const;

 private:
  static constexpr std::size_t kMaxEnded = 32;  // a job may make and end any number

  mutable std::mutex mutex_;
  std::map<const void*, Source> sources_;  // guarded by mutex_
  std::deque<Progress> ended_;             // guarded by mutex_; newest first
};

// How a transport learns that the job has failed, and tells it. Thread-safe.
class Supervisor {
 public:
  virtual ~Supervisor() = default;

  virtual FailureLatch& latch() = 0;

  // Reports a failure as seen from this rank, waits (briefly, bounded) until the job has agreed on
  // its first cause, trips the latch with that cause and throws it.
  [[noreturn]] virtual void fail(const Error& seen) = 0;
  // The same for a thread that has no caller to throw to.
  void fail_quietly(const Error& seen) noexcept;

  // Ends the job on every rank at once. Does not block on peers.
  virtual void abort(const std::string& reason) = 0;
  // This rank has failed by itself. Where the others survive losses they go on without it;
  // otherwise the same as abort().
  virtual void give_up(const std::string& reason) { abort(reason); }

  // Every communicator of this rank enters itself here. A group's number means the same
  // communicator on every rank, and all its members describe a collective alike.
  virtual ProgressBook& progress_book() = 0;

  // Called now and then by a rank that waits, for supervisors that have no thread of their own.
  virtual void look_around() = 0;
};

}  // namespace lockstep

#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "lockstep/files/atomic_file.h"
#include "lockstep/files/lease.h"

namespace lockstep {

// Whether this process may write to the folder of its run: it does as rank 0, while it holds the
// lease. Without a folder nothing is ever held. Thread-safe.
class OutputHold {
 public:
  // `job` names the run, the same in all its processes. A holder that is silent for `term` loses
  // the lease.
  OutputHold(std::string folder, std::string job, std::chrono::nanoseconds term);

  // At the start of a run of `workers`, as its rank 0. Throws Error{kInvalidArgument} that names
  // the other run where there is one.
  void take(int workers);
  // This process has become rank 0 of the run in a later generation: it holds the folder as soon as
  // the one before is seen to be gone. Does not wait.
  void take_over(std::uint32_t generation, int workers);
  bool held();
  // Before every write: waits for the lease while it is being taken over, and throws Error{kIo} if
  // it is another's. A process that stood still has lost it; the only worker of its run waits until
  // it has it again, which takes a term.
  WriteGuard guard();

 private:
  void require(const std::string& path);
  Lease::Options options(std::uint32_t generation) const;

  const std::string folder_;
  const std::string job_;
  const std::string member_;
  const std::chrono::nanoseconds term_;
  std::mutex mutex_;
  std::shared_ptr<Lease> lease_;  // guarded by mutex_; who uses it without the lock has a share
  bool was_held_ = false;         // guarded by mutex_
  bool is_alone_ = false;         // guarded by mutex_
};

}  // namespace lockstep

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

  // At the start of a run, as its rank 0. Throws Error{kInvalidArgument} that names the other run
  // where there is one.
  void take();
  // This process is rank 0 of the run in a later generation: it holds the folder as soon as the one
  // before has let it go, or is seen to be gone. Does not wait.
  void take_over(std::uint32_t generation);
  // This process is not rank 0, or may not be: the next one need not wait for it. A write under way
  // fails at its next look at the lease.
  void let_go();
  bool held();
  // Before every write: waits for the lease while it is being taken over, and throws Error{kIo} if
  // it is another's. A process that stood still does not hold it any more: it waits for a term in
  // which nobody takes it, and has it again.
  WriteGuard guard();

 private:
  void require(const std::string& path);
  Lease::Options options(std::uint32_t generation) const;

  const std::string folder_;
  const std::string job_;
  const std::string member_;
  const std::chrono::nanoseconds term_;
  std::mutex mutex_;
  // Guarded by mutex_; who uses it without the lock has a share. None: this process is not rank 0.
  std::shared_ptr<Lease> lease_;
};

}  // namespace lockstep

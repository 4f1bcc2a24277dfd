#pragma once

#include <sys/signalfd.h>

#include <csignal>
#include <optional>

#include "lockstep/base/descriptor.h"

namespace lockstep {

// Blocks the signals that a launcher reads from a descriptor (ends of children, stops, SIGUSR1 and
// SIGUSR2); undone when it goes. Throws Error{kIo}.
class BlockedSignals {
 public:
  BlockedSignals();
  ~BlockedSignals() { ::sigprocmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

  int fd() const { return descriptor_.get(); }
  const sigset_t& before() const { return before_; }
  std::optional<signalfd_siginfo> next() const;

 private:
  sigset_t before_{};
  Descriptor descriptor_;
};

}  // namespace lockstep

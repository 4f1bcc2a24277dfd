#pragma once

#include <signal.h>
#include <sys/signalfd.h>

#include <cerrno>

#include "lockstep/base/descriptor.h"
#include "lockstep/base/error.h"

namespace lockstep::cli {

// SIGINT and SIGTERM as a descriptor, so that a command stops cleanly; undone when it goes. Threads
// started after it leave the signals alone.
class StopSignals {
 public:
  StopSignals() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    ::pthread_sigmask(SIG_BLOCK, &set, &before_);
    descriptor_ = Descriptor(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!descriptor_) throw_io("signalfd", errno);
  }
  ~StopSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // Readable once a signal has come.
  int fd() const { return descriptor_.get(); }
  // 130 or 143 if a signal has come, `otherwise` if none has.
  int exit_code(int otherwise) const {
    signalfd_siginfo info{};
    if (::read(fd(), &info, sizeof info) != sizeof info) return otherwise;
    return 128 + static_cast<int>(info.ssi_signo);
  }

 private:
  sigset_t before_{};
  Descriptor descriptor_;
};

}  // namespace lockstep::cli

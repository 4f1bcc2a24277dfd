#include "lockstep/launch/blocked_signals.h"

#include <unistd.h>

#include <cerrno>

#include "lockstep/base/error.h"

namespace lockstep {

BlockedSignals::BlockedSignals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : {SIGCHLD, SIGINT, SIGTERM, SIGUSR1, SIGUSR2}) sigaddset(&set, number);
  // Under nohup it stays ignored: a blocked signal would be read all the same.
  struct sigaction hangup {};
  ::sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaddset(&set, SIGHUP);
  ::sigprocmask(SIG_BLOCK, &set, &before_);
  descriptor_ = Descriptor(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!descriptor_) throw_io("signalfd", errno);
}

std::optional<signalfd_siginfo> BlockedSignals::next() const {
  signalfd_siginfo info{};
  if (::read(fd(), &info, sizeof info) != sizeof info) return std::nullopt;
  return info;
}

}  // namespace lockstep

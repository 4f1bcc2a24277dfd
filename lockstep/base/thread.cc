#include "lockstep/base/thread.h"

#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <utility>

#include "lockstep/base/check.h"

namespace lockstep {
namespace {

// Blocks all signals of the calling thread while it lives, but for those of its own faults; a
// thread that is started meanwhile has them blocked for good.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    for (const int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL}) ::sigdelset(&all, fault);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

void Thread::start(std::string name, std::function<void()> body,
                   std::function<void(const Error&)> failed) {
  LOCKSTEP_CHECK(!started());
  const SignalsBlocked blocked;
  try {
    thread_ = std::thread([name, body = std::move(body), failed = std::move(failed)] {
      try {
        body();
      } catch (...) {
        failed(caught_error(name));
      }
    });
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::kIo, fmt::format("{} cannot be started: {}", name, error.what()));
  }
}

void Thread::join() {
  if (thread_.joinable()) thread_.join();
}

Error caught_error(std::string_view who) {
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return Error(ErrorCode::kIo, fmt::format("{} failed: {}", who, error.what()));
  } catch (...) {
    return Error(ErrorCode::kIo, fmt::format("{} failed", who));
  }
}

}  // namespace lockstep

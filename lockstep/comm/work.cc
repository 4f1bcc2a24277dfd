#include "lockstep/comm/work.h"

#include <fmt/format.h>

#include "lockstep/base/check.h"
#include "lockstep/net/job/supervisor.h"

namespace lockstep {

Work::Work(std::shared_ptr<WorkState> state, Supervisor* supervisor, std::string description)
    : state_(std::move(state)), supervisor_(supervisor), description_(std::move(description)) {}

bool Work::done() const {
  LOCKSTEP_CHECK(valid());
  const std::lock_guard lock(state_->mutex);
  return state_->done;
}

bool Work::wait_until(Deadline deadline) const {
  LOCKSTEP_CHECK(valid());
  std::unique_lock lock(state_->mutex);
  return state_->ended.wait_until(lock, deadline.time(), [&] { return state_->done; });
}

Outcome Work::wait(Deadline deadline) {
  LOCKSTEP_CHECK(valid());
  std::unique_lock lock(state_->mutex);
  const auto done = [&] { return state_->done; };
  if (!state_->ended.wait_until(lock, deadline.time(), done)) {
    lock.unlock();
    supervisor_->abort(fmt::format("waited in vain for {}", description_));
    lock.lock();
    // Bounded: an aborted group ends everything pending at once.
    state_->ended.wait(lock, done);
  }
  if (state_->error) throw *state_->error;
  return state_->outcome;
}

}  // namespace lockstep

#include "lockstep/net/job/supervisor.h"

#include <sys/eventfd.h>

#include <cerrno>

#include "lockstep/base/check.h"

namespace lockstep {
FailureLatch::FailureLatch() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) throw_io("eventfd", errno);
}

bool FailureLatch::trip(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (error_) return false;
  error_ = error;
  tripped_.store(true, std::memory_order_release);
  // The first write to an eventfd cannot fail: its counter is zero.
  const std::uint64_t one = 1;
  LOCKSTEP_CHECK(::write(event_.get(), &one, sizeof(one)) == sizeof(one));
  return true;
}

std::optional<Error> FailureLatch::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void FailureLatch::rethrow() const { throw Error(*error()); }

void ProgressBook::add(const void* owner, Source source) {
  const std::lock_guard lock(mutex_);
  sources_[owner] = std::move(source);
}

void ProgressBook::remove(const void* owner) {
  const std::lock_guard lock(mutex_);
  const auto found = sources_.find(owner);
  if (found == sources_.end()) return;
  const std::vector<Progress> last = found->second();
  if (!last.empty()) ended_.push_front(last.front());
  if (ended_.size() > kMaxEnded) ended_.pop_back();
  sources_.erase(found);
}

std::vector<Progress> ProgressBook::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<Progress> progress;
  for (const auto& [owner, source] : sources_) {
    for (Progress& entry : source()) progress.push_back(std::move(entry));
  }
  progress.insert(progress.end(), ended_.begin(), ended_.end());
  return progress;
}

}  // namespace lockstep

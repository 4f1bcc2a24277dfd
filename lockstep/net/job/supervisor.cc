#include "lockstep/net/job/supervisor.h"

#include <utility>

namespace lockstep {

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

void Supervisor::fail_quietly(const Error& seen) noexcept {
  try {
    fail(seen);
  } catch (...) {  // the latch has it
  }
}

}  // namespace lockstep

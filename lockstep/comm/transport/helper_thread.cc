#include "lockstep/comm/transport/helper_thread.h"

#include <utility>

namespace lockstep {

HelperThread::~HelperThread() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void HelperThread::start(std::function<void()> task) {
  std::unique_lock owner(owner_);
  {
    const std::lock_guard lock(mutex_);
    if (!thread_.started()) {
      // Its tasks' errors are caught one by one; nothing else there throws.
      thread_.start(
          name_, [this] { serve(); }, [](const Error&) {});
    }
    task_ = std::move(task);
    error_.reset();
  }
  changed_.notify_all();
  owner.release();  // wait() unlocks it
}

bool HelperThread::ends_within(std::chrono::nanoseconds time) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, time, [&] { return !task_; });
}

std::optional<Error> HelperThread::wait() {
  std::optional<Error> error;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !task_; });
    error = error_;
  }
  owner_.unlock();
  return error;
}

void HelperThread::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closing_ || task_; });
    if (!task_) return;
    lock.unlock();
    std::optional<Error> error;
    try {
      task_();
    } catch (...) {
      error = caught_error(name_);
    }
    lock.lock();
    error_ = error;
    task_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace lockstep

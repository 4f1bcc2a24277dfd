#include "lockstep/comm/transport/sender.h"

#include <utility>

namespace lockstep {

Sender::~Sender() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Sender::start(std::function<void()> task) {
  std::unique_lock owner(owner_);
  {
    const std::lock_guard lock(mutex_);
    if (!thread_.started()) {
      // Its tasks' errors are caught one by one; nothing else there throws.
      thread_.start(
          "the sending thread", [this] { serve(); }, [](const Error&) {});
    }
    task_ = std::move(task);
    error_.reset();
  }
  changed_.notify_all();
  owner.release();  // wait() unlocks it
}

std::optional<Error> Sender::wait() {
  std::optional<Error> error;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !task_; });
    error = error_;
  }
  owner_.unlock();
  return error;
}

void Sender::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closing_ || task_; });
    if (!task_) return;
    lock.unlock();
    std::optional<Error> error;
    try {
      task_();
    } catch (...) {
      error = caught_error("the sending thread");
    }
    lock.lock();
    error_ = error;
    task_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace lockstep

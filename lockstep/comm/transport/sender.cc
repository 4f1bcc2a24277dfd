#include "lockstep/comm/transport/sender.h"

#include <utility>

namespace lockstep {

Sender::~Sender() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Sender::start(std::function<void()> task) {
  owner_.lock();
  {
    const std::lock_guard lock(mutex_);
    task_ = std::move(task);
    error_.reset();
    if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  }
  changed_.notify_all();
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
    } catch (const Error& caught) {
      error = caught;
    }
    lock.lock();
    error_ = error;
    task_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace lockstep

#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/thread.h"

namespace lockstep {

// A thread that does one task at a time beside its owner, such as sending while the owner receives.
// It exists from the first start() on.
class HelperThread {
 public:
  // `name` is how messages call the thread: "the sending thread".
  explicit HelperThread(std::string name) : name_(std::move(name)) {}
  ~HelperThread();
  HelperThread(const HelperThread&) = delete;
  HelperThread& operator=(const HelperThread&) = delete;

  // Waits for its turn where another thread of the owner still has a task under way. Throws
  // Error{kIo} where no thread can be had; then there is nothing to wait for.
  void start(std::function<void()> task);
  // Whether the task has ended, or does within `time`.
  bool ends_within(std::chrono::nanoseconds time);
  // Until the task has ended; what it threw, as an Error. The task itself has the deadline.
  std::optional<Error> wait();

 private:
  void serve();

  const std::string name_;
  std::mutex owner_;  // held from start() to wait()
  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> task_;  // guarded by mutex_; empty when there is none
  std::optional<Error> error_;  // guarded by mutex_
  bool closing_ = false;        // guarded by mutex_
  Thread thread_;
};

}  // namespace lockstep

#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/thread.h"

namespace lockstep {

// A thread that does one task at a time beside its owner, such as sending while the owner receives.
// It exists from the first start() on.
class Sender {
 public:
  Sender() = default;
  ~Sender();
  Sender(const Sender&) = delete;
  Sender& operator=(const Sender&) = delete;

  // Waits for its turn where another thread of the owner still has a task under way. Throws
  // Error{kIo} where no thread can be had; then there is nothing to wait for.
  void start(std::function<void()> task);
  // Until the task has ended; what it threw, as an Error. The task itself has the deadline.
  std::optional<Error> wait();

 private:
  void serve();

  std::mutex owner_;  // held from start() to wait()
  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> task_;  // guarded by mutex_; empty when there is none
  std::optional<Error> error_;  // guarded by mutex_
  bool closing_ = false;        // guarded by mutex_
  Thread thread_;
};

}  // namespace lockstep

#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "lockstep/base/event.h"
#include "lockstep/base/thread.h"
#include "lockstep/net/job/centre.h"
#include "lockstep/net/job/member.h"

namespace lockstep {

// The control thread of a process: serves the Centre, if this process has it, and the Member, once
// this process has joined. The destructor says goodbye for both and does not wait for peers.
// Thread-safe.
class ControlLoop {
 public:
  // `centre` may be null. Latch and book must outlive the loop.
  ControlLoop(FailureLatch& latch, const ProgressBook& book, std::unique_ptr<Centre> centre);
  ~ControlLoop();
  ControlLoop(const ControlLoop&) = delete;
  ControlLoop& operator=(const ControlLoop&) = delete;

  void attach(Link link, const MemberOptions& options);
  // Sends a report to the centre. False if the centre cannot be reached.
  bool report(const Error& error);

  bool centre_left() const { return centre_left_.load(std::memory_order_acquire); }

 private:
  void run();
  void end();
  void poll_once();
  // Takes over what other threads have handed in; returns whether to go on.
  bool take_orders();

  FailureLatch& latch_;
  const ProgressBook& book_;
  const Event wake_;

  std::mutex mutex_;
  std::vector<Error> reports_;       // guarded by mutex_
  std::unique_ptr<Member> joining_;  // guarded by mutex_
  bool stop_ = false;                // guarded by mutex_

  std::atomic<bool> connected_{false};
  std::atomic<bool> centre_left_{false};

  std::unique_ptr<Centre> centre_;  // control thread only, as the rest
  std::unique_ptr<Member> member_;
  std::vector<pollfd> entries_;
  Thread thread_;
};

}  // namespace lockstep

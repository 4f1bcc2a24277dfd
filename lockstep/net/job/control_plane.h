#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/net/job/supervisor.h"

namespace lockstep {

class Centre;
class ControlLoop;
class Link;
struct MemberOptions;

// A rank's link to the centre of the job, and the one thread that serves it: heartbeats both ways,
// reports to the centre, verdicts from it. The rank that serves the rendezvous is the centre and
// serves the other ends of all links on the same thread. Thread-safe.
//
// The destructor says goodbye and never waits for a peer. When the centre leaves first, the other
// ranks go on without it: fail() then falls back on what the rank itself saw.
class ControlPlane final : public Supervisor {
 public:
  // Alone in the world: no thread, no socket.
  ControlPlane();
  // Serves as the centre from now on, before this rank itself has joined.
  explicit ControlPlane(std::unique_ptr<Centre> centre);
  ~ControlPlane() override;
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;

  // Hands over the link on which this rank has joined. Once, before other threads use this.
  void attach(Link link, const MemberOptions& options);

  FailureLatch& latch() override { return latch_; }
  // Waits for the verdict at most a second, and at most the job's timeout.
  [[noreturn]] void fail(const Error& seen) override;
  void abort(const std::string& reason) override;

  // Asked from the control thread with every heartbeat.
  ProgressBook& progress_book() override { return progress_book_; }
  void look_around() override {}

 private:
  FailureLatch latch_;
  ProgressBook progress_book_;
  std::unique_ptr<const MemberOptions> member_;  // constant once attached
  std::unique_ptr<ControlLoop> loop_;            // null while alone
};

}  // namespace lockstep

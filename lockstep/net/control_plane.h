#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/net/supervisor.h"

namespace lockstep {

class Centre;
class ControlLoop;
class Link;
struct MemberOptions;

// A rank's link to the centre of the job, and the one thread that serves it: heartbeats both ways,
// reports to the centre, verdicts from it. The rank that serves the rendezvous is the centre and
// runs its side of the star on the same thread. Thread-safe.
//
// The destructor takes leave and never waits for a peer. When the centre leaves first, the rest go
// on without control: fail() then falls back on what the rank itself saw.
class ControlPlane final : public Supervisor {
 public:
  // Which collective this rank entered last, one entry for each communicator. A channel must mean
  // the same communicator on every rank, and all its members must describe a collective alike.
  using ProgressSource = std::function<std::vector<Progress>()>;

  // Alone in the world: no thread, no socket.
  ControlPlane();
  // Serves the star from now on, before this rank itself has joined.
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

  // Called from the control thread; it must not block. A new source replaces the old one, which is
  // asked a last time: when set_progress_source({}) has returned it will not be called again, and
  // what it said then stands as this rank's progress.
  void set_progress_source(ProgressSource source);

 private:
  FailureLatch latch_;
  std::unique_ptr<const MemberOptions> member_;  // constant once attached
  std::unique_ptr<ControlLoop> loop_;            // null while alone
};

}  // namespace lockstep

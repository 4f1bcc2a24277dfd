#pragma once

#include <memory>
#include <optional>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/net/job/arrivals.h"
#include "lockstep/net/job/supervisor.h"
#include "lockstep/wire/join_messages.h"

namespace lockstep {

class Centre;
class ControlLoop;
class Door;
struct MemberOptions;

// This process's part in the control of a job, and the one thread that serves it: heartbeats to and
// from the centre, reports to it, verdicts from it. The process that has the centre serves the
// other ends of all links on the same thread, and every process serves its door there. Thread-safe.
//
// The destructor says goodbye and never waits for a peer. When the centre leaves first, the other
// members go on without it: fail() then falls back on what the rank itself saw.
class ControlPlane final : public Supervisor {
 public:
  // Alone in the world: no thread, no socket.
  ControlPlane();
  // Serves the door, and the centre if this process has it, from now on; both may be null. `title`
  // is how messages call this process until it has a rank.
  ControlPlane(std::unique_ptr<Door> door, std::unique_ptr<Centre> centre, std::string title,
               Deadline::Clock::duration timeout);
  ~ControlPlane() override;
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;

  // Asks to join over a link that has passed the handshake; without one, at the centre of this
  // process. Once, before other threads use this. Returns when the job has formed, or throws why it
  // has not.
  RosterMessage join(std::optional<Link> link, MemberOptions options);
  // The same for a process that is no member: waits until the others have formed the job.
  RosterMessage wait_for_roster(Deadline deadline);

  // Whether all members of the job that formed here have gone.
  bool all_left() const;
  // Waits for that until the deadline. Throws the cause if the job has failed.
  void wait_until_all_left(Deadline deadline);

  // This process's, once it has joined; -1: none.
  int rank() const { return rank_; }
  // Connections for this process, other than to the centre.
  Arrivals& arrivals() { return arrivals_; }

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
  Arrivals arrivals_;
  // Constant once joined.
  std::string name_ = "rank 0";
  int rank_ = 0;
  CentreCard centre_;
  Deadline::Clock::duration timeout_{};
  std::unique_ptr<ControlLoop> loop_;  // null while alone; last: it uses all of the above
};

}  // namespace lockstep

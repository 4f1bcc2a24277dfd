#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/net/job/arrivals.h"
#include "lockstep/net/job/centre.h"
#include "lockstep/net/job/member.h"
#include "lockstep/net/job/supervisor.h"
#include "lockstep/wire/control_messages.h"
#include "lockstep/wire/join_messages.h"

namespace lockstep {

class ControlLoop;
class Door;
struct ControlNews;
struct Watch;

// How a member finds the centre of its job again after it has lost it.
struct WayBack {
  // Calls whoever listens at the address and passes the handshake, and is `whom` where that is
  // given; throws an Error if nobody does. This process says that it is `rank`; -1: it has none.
  std::function<Link(const std::string& address, int rank, const std::optional<MemberId>& whom,
                     Deadline deadline)>
      call;
  // For this process in the role of the centre; null where the role does not move.
  std::function<std::unique_ptr<Centre>(Inheritance)> make_centre;
  std::string home;   // where the centre always is, if the role does not move
  std::string first;  // whom this process called first, who may be any member
};

// This process's part in the control of a job, and the one thread that serves it: heartbeats to and
// from the centre, reports to it, the ends of generations and verdicts from it. The process that
// has the centre serves the other ends of all links on the same thread, and every process serves
// its door there. As a Supervisor it watches over the newest generation. Thread-safe, but for
// join(), regroup() and what follows them, which one thread calls while no other uses this.
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
  // process. Once. Returns when the first generation has formed, or throws why it has not. Nothing:
  // the job runs already, and welcome() tells what it is.
  std::optional<RosterMessage> join(std::optional<Link> link, MemberOptions options,
                                    WayBack way_back = {});
  const std::optional<Description>& welcome() const { return welcome_; }
  // The same for a process that is no member: waits until the others have formed the job.
  RosterMessage wait_for_roster(Deadline deadline);

  // The only process of a job that nobody can join.
  bool is_alone() const { return loop_ == nullptr; }
  // Asks for the next generation, and returns its roster; looks for the centre if that is gone.
  // Nobody uses the generation before any more. Throws why there is no next one.
  RosterMessage regroup(Standing standing, std::int64_t step);
  // This process can call collectives of the new generation. Returns when all can. Throws the
  // latch's error if the generation ends before.
  void ready_to_go();
  // Whether the newest generation has ended with this error, and regroup() may form another one.
  bool survives(const Error& error) const;
  // Whether this process has stood still for the timeout and is no member until it has joined
  // again.
  bool stood_still() const;
  // What newcomers are told; the same on all members.
  void describe(Description description);
  // A line of metrics, from rank 0 to the process that has the centre. Never waits; lost where the
  // centre is out of reach.
  void tell(std::string line);
  // What the centre wants of this rank in this generation.
  Wish wanted() const;
  // To all ranks of the job whose centre this process has.
  void wish(const Wish& wish);
  // Has them write what they did last, but for these processes of this host. False: another process
  // has the centre.
  bool ask_flight(std::vector<std::int32_t> but = {});
  // What this rank does when the centre asks for it: on the control thread, so it must not wait.
  void on_flight_asked(std::function<void()> write);
  // Of the process that has the centre: the newest roster, what has become of members since the
  // last call, and the most steps that any has done.
  std::optional<RosterMessage> centre_roster() const;
  std::vector<MemberEvent> take_events();
  // Likewise: the lines of metrics that rank 0 has told since the last call.
  std::vector<std::string> take_lines();
  std::int64_t centre_step() const;
  // A process of a member, started by this one, has ended.
  void process_ended(std::int32_t pid, std::string how, bool own_fault);
  // The newest generation's, as this member knows it.
  const std::optional<RosterMessage>& roster() const { return roster_; }

  // Readable once somebody has joined the job whose centre this process has.
  int members_fd() const;
  // Whether all members of the job that formed here have gone.
  bool all_left() const;
  // Whether this process had the centre and stood still, so that the members have another one.
  bool gave_role_up() const;
  // Waits for that until the deadline. Throws the cause if the job has failed.
  void wait_until_all_left(Deadline deadline);

  // This process's, once it has joined; -1: none.
  int rank() const { return rank_; }
  // Connections for this process, other than to the centre.
  Arrivals& arrivals() { return arrivals_; }

  FailureLatch& latch() override;
  const FailureLatch& latch() const;
  // Waits for the verdict at most a second, and at most the job's timeout. Error{kIo} that names no
  // other rank is this one's own trouble: where the others survive that, it gives up.
  [[noreturn]] void fail(const Error& seen) override;
  void abort(const std::string& reason) override;
  // For a process that has the centre and is no rank: tells it of a failure in the generation with
  // this tag, and goes on.
  void report(const Error& seen, std::uint32_t generation);
  // This rank is lost by its own fault; where the others survive losses, they go on without it.
  void give_up(const std::string& reason) override;

  // Asked from the control thread with every heartbeat.
  ProgressBook& progress_book() override;
  void look_around() override {}

 private:
  ControlNews wait_for_answer(Deadline deadline);
  // The centre is gone: goes to another one, or becomes it. Throws when there is none.
  void find_centre(const ControlNews& news, Standing standing, std::int64_t step);
  void take_roster(const RosterMessage& message);
  // The job goes on when this rank is lost.
  bool others_survive() const;
  // All threads of this process throw `cause` then.
  void give_up(const std::string& reason, const Error& cause);
  bool gave_up() const;

  std::shared_ptr<Watch> watch_;  // of the newest generation
  Arrivals arrivals_;
  // Constant in a generation.
  std::string name_ = "rank 0";
  int rank_ = 0;
  Deadline::Clock::duration timeout_{};
  std::optional<RosterMessage> roster_;
  std::string why_ended_;  // the one before
  mutable std::mutex giving_up_;
  bool gave_up_ = false;  // guarded by giving_up_
  // Constant once joined.
  MemberOptions options_;
  WayBack way_back_;
  std::optional<Description> welcome_;
  std::optional<Description> description_;
  std::unique_ptr<ControlLoop> loop_;  // null while alone; last: it uses all of the above
};

}  // namespace lockstep

#pragma once

#include <poll.h>

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/net/job/link.h"
#include "lockstep/net/job/supervisor.h"
#include "lockstep/wire/join_messages.h"

namespace lockstep {

struct MemberOptions {
  int rank = 0;
  std::string name;  // of this rank, as in name_of(card)
  CentreCard centre;
  Deadline::Clock::duration timeout{};
};

// A rank's end of its link to the centre: sends heartbeats, receives verdicts. Trips the latch when
// a verdict comes or the centre is lost. Never waits; an event loop drives it as it drives Centre.
// Used by one thread.
class Member {
 public:
  using Clock = Deadline::Clock;
  using Ask = std::function<std::vector<Progress>()>;

  Member(Link link, MemberOptions options, FailureLatch& latch, Ask progress);
  ~Member();
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  void add_poll(std::vector<pollfd>& entries) const;
  Clock::time_point wake_at() const;
  void serve(std::span<const pollfd> entries);

  void report(const Error& error);
  // Says goodbye, so that the centre does not take the end of the link for a death.
  void leave();

  // Whether a report would reach the centre.
  bool connected() const { return static_cast<bool>(link_.socket()); }
  // Whether the centre has taken leave.
  bool centre_left() const { return centre_progress_.has_value(); }

 private:
  void receive(const Message& message, Clock::time_point now);
  void send_heartbeat(Clock::time_point now);
  void lose_centre(std::string how);
  void check_centre_left();

  const MemberOptions options_;
  FailureLatch& latch_;
  const Ask progress_;
  Link link_;
  Clock::time_point last_heard_;
  Clock::time_point last_look_;
  Clock::time_point next_heartbeat_;
  std::optional<std::vector<Progress>> centre_progress_;  // its last, once it has left
};

}  // namespace lockstep

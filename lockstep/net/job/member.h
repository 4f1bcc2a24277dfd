#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/wire/control_messages.h"
#include "lockstep/wire/join_messages.h"
#include "lockstep/wire/message.h"

namespace lockstep {

struct MemberOptions {
  Card card;
  std::string centre = "the rendezvous";  // how messages call it until it has said who it is
  // How long to wait for the other members.
  Deadline::Clock::duration patience{};
};

// A member's end of its link to the centre: asks to join, then sends heartbeats and reports and
// hears verdicts. Events and the time go in, messages come out; no I/O. Used by one thread.
class Member {
 public:
  using Clock = Deadline::Clock;
  using Time = Clock::time_point;
  // What this process's communicators are doing.
  using Ask = std::function<std::vector<Progress>()>;

  Member(MemberOptions options, Ask progress, Time now);

  void received(const Message& message, Time now);
  // The link broke, or what came over it was not ours.
  void lost(const Error& why);
  // To be called at wake_at() at the latest, after all events that happened before.
  void tick(Time now);
  void report(const Error& error);
  // Says goodbye, so that the centre does not take the end of the link for a death.
  void leave();

  Time wake_at() const;
  std::vector<SharedBytes> take_sendings() { return std::exchange(sendings_, {}); }

  // Once all members are there; true from then on.
  bool joined() const { return rank_ >= 0; }
  int rank() const { return rank_; }
  // The roster, once, when it has come.
  std::optional<RosterMessage> take_roster() { return std::exchange(roster_, std::nullopt); }
  // Why the job failed, or did not form.
  const std::optional<Error>& failure() const { return failure_; }
  // Whether the link is of use: a report would reach the centre.
  bool connected() const { return connected_; }
  // Whether the centre has taken leave. The job goes on without it.
  bool centre_left() const { return centre_progress_.has_value(); }

 private:
  void answer(const Message& message, Time now);
  void hear(const Message& message, Time now);
  void send(MessageKind kind, std::span<const std::byte> body);
  void send_heartbeat(Time now);
  void fail(const Error& error);
  void lose_centre(const std::string& how);
  void check_centre_left();

  const MemberOptions options_;
  const Ask progress_;
  const Time gives_up_;

  bool connected_ = true;
  std::optional<RosterMessage> roster_;  // until it is taken
  int rank_ = -1;                        // once joined, as the rest
  std::string name_;
  CentreCard centre_;
  Clock::duration timeout_{};  // of the job
  Time last_heard_;
  Time last_look_;
  Time next_heartbeat_;
  std::optional<std::vector<Progress>> centre_progress_;  // its last, once it has left
  std::optional<Error> failure_;
  std::vector<SharedBytes> sendings_;
};

}  // namespace lockstep

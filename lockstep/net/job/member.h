#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
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
  // How long to wait for the other members, every time.
  Deadline::Clock::duration patience{};
  Deadline::Clock::duration timeout =
      std::chrono::seconds(30);  // until the centre has told its own
  bool survives = false;         // losses of other members
  std::uint32_t min_workers = 1;
  // For a member that has been in a generation, and comes to another centre.
  Standing standing = Standing::kNew;
  std::int64_t step = 0;
  std::optional<RosterMessage> last = {};
  std::optional<Description> description = {};
  bool paused = false;  // see Member::paused()
};

// A member's end of its link to the centre: asks to join, then sends heartbeats and reports and
// hears that a generation has ended, or the job. Events and the time go in, messages come out; no
// I/O. Used by one thread.
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
  // As Centre::machine_slept.
  void machine_slept(Clock::duration time) {
    last_look_ -= time;
    last_word_ -= time;
  }
  // To be called at wake_at() at the latest, after all events that happened before.
  void tick(Time now);
  void report(const Error& error);
  // Says goodbye, so that the centre does not take the end of the link for a death.
  void leave();

  // Asks to be in the next generation. The one before has ended, or ends by this. A prepared
  // newcomer may be a spare: it waits for as long as its centre is heard.
  void join_again(Standing standing, std::int64_t step, Time now);
  // This process is ready for collectives of the generation whose roster was taken.
  void ready();
  // For newcomers; the same on all members.
  void describe(Description description);
  // A line of metrics, for whoever shows the run where the centre is. Dropped while there is no way
  // there.
  void tell(std::string_view line);

  Time wake_at() const;
  std::vector<SharedBytes> take_sendings() { return std::exchange(sendings_, {}); }

  // Whether this member is in a generation, or was in one.
  bool joined() const { return rank_ >= 0; }
  int rank() const { return rank_; }
  const std::string& name() const { return name_; }
  // The roster of a generation, once, when it has come.
  std::optional<RosterMessage> take_roster() { return std::exchange(news_, std::nullopt); }
  // The roster of the newest generation that has come.
  const std::optional<RosterMessage>& roster() const { return roster_; }
  // All members of the newest generation are ready.
  bool may_go() const { return may_go_; }
  // What the job is, told to a newcomer; for others, what they have said.
  const std::optional<Description>& description() const { return description_; }
  bool welcomed() const { return welcomed_; }
  const Wish& wish() const { return wish_; }
  // Whether the centre has asked, since the last call, for what this rank did last.
  bool take_flight_asked() { return std::exchange(flight_asked_, false); }

  // Whether the centre has said, since the last call, that all lanes have a worker and this
  // newcomer waits until one of them goes.
  bool take_spare() { return std::exchange(spare_, false); }

  // Why the newest generation has ended, if it has; the job goes on. join_again() clears it.
  const std::optional<Error>& ended() const { return ended_; }
  // Why the job failed, or did not form.
  const std::optional<Error>& failure() const { return failure_; }
  // Whether the link is of use: a report would reach the centre.
  bool connected() const { return connected_; }
  // Whether the centre has taken leave. A generation goes on without it.
  bool centre_left() const { return centre_progress_.has_value(); }
  // Whether this process stood still for the timeout: the others may have lost it. Over when the
  // centre has been heard again for a while, or lets it in over a new link.
  bool paused() const { return paused_; }
  // It asks to be in a generation, and has no answer yet.
  bool waiting() const { return waiting_; }
  // Where the centre is, as told by a process that is not it; empty: it does not know now.
  const std::optional<std::string>& redirect() const { return redirect_; }

 private:
  void take_news(RosterMessage roster, Time now);
  void hear(const Message& message, Time now);
  void hear_heartbeat(Time now);
  void notice_pause(Time now);
  void set_paused();
  bool heard_since_pause(Time now);
  void hear_roster(const Message& message, Time now);
  void send(MessageKind kind, std::span<const std::byte> body);
  void send_join(Standing standing, std::int64_t step);
  void send_heartbeat(Time now);
  void send_description();
  void fail(const Error& error);
  void lose_centre(const std::string& how);
  void check_centre_left();
  bool survives() const { return options_.survives && roster_ && roster_->survives; }
  std::uint32_t tag() const { return roster_ ? tag_of(roster_->generation) : 0; }

  const MemberOptions options_;
  const Ask progress_;

  bool connected_ = true;
  bool waiting_ = true;                // for a roster
  Time gives_up_;                      // waiting for it
  std::optional<RosterMessage> news_;  // until it is taken
  std::optional<RosterMessage> roster_;
  bool may_go_ = false;
  int rank_ = -1;  // once joined, as the rest
  std::string name_;
  CentreCard centre_;
  Clock::duration timeout_{};  // of the job
  Time last_heard_;
  Time last_look_;
  Time last_word_;  // the heartbeat before the last look
  Time next_heartbeat_;
  bool paused_ = false;
  bool paused_here_ = false;  // while it had this link
  std::optional<Time> heard_after_pause_;
  bool welcomed_ = false;
  std::optional<Description> description_;
  bool described_ = false;  // over this link
  std::optional<std::string> redirect_;
  Wish wish_;
  bool flight_asked_ = false;
  bool spare_ = false;
  std::optional<std::vector<Progress>> centre_progress_;  // its last, once it has left
  std::optional<Error> ended_;
  std::optional<Error> failure_;
  std::vector<SharedBytes> sendings_;
};

}  // namespace lockstep

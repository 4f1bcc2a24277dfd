#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/host.h"
#include "lockstep/base/index.h"
#include "lockstep/net/job/gathering.h"
#include "lockstep/net/job/handshake.h"
#include "lockstep/net/job/job_health.h"
#include "lockstep/net/job/reach.h"
#include "lockstep/wire/control_messages.h"
#include "lockstep/wire/join_messages.h"
#include "lockstep/wire/message.h"

namespace lockstep {

struct CentreOptions {
  CentreCard card;
  int world_size = 1;  // of the first generation
  std::string version;
  Deadline::Clock::duration timeout{};
  // How long to wait for the members, who have a patience of their own; zero: the timeout.
  Deadline::Clock::duration patience{};
  // The member of the centre's own process, if it has one.
  std::optional<MemberId> member = {};
  // Whether another process takes the role when this one is gone, or stands still.
  bool moves = true;
  // What those are told who come without a rank while the job forms. None: nothing, they are taken
  // as they are.
  std::optional<std::vector<std::byte>> invitation = {};
  std::function<MemberId()> make_id = random_member_id;  // of generations
};

// What a member that becomes the centre takes over from the one before.
struct Inheritance {
  RosterMessage roster;  // of the last generation
  Description description;
  std::vector<int> lost;  // its ranks that are known to be gone
  std::string why = {};   // as far as is known
};

// What has become of a member: it has joined, or gone.
struct MemberEvent {
  Card card;  // its rank is that of the generation that it was in, or is in now
  std::optional<Departure> departure = {};
};

// The centre of a job: lets the members in and forms generations of them. It hears their
// heartbeats. When a member is lost it ends the generation and forms the next one of those that are
// left; where a member does not survive losses, it tells all of them why the job failed. Gathering
// and JobHealth judge; this class turns what comes over the links into events for them, and what
// they decide into messages. Events and the time go in, messages come out; no I/O. Used by one
// thread.
//
// A generation after the first begins in four steps. The one before ends: by kEnd to all, or at a
// boundary between steps that all members know of. Every member joins again. When all have, or are
// lost, they get the new roster, and answer that they are ready; then go.
//
// No event costs more the more members there are, save forming a generation and messages to all.
class Centre {
 public:
  using Clock = Deadline::Clock;
  using Time = Clock::time_point;
  // Names a link for as long as it is open. One that opens later has a greater name.
  using LinkId = std::uint64_t;

  Centre(CentreOptions options, Time now);
  // In place of a centre that is gone: the members of its last generation will come.
  Centre(CentreOptions options, Inheritance inherited, Time now);

  // A member has come through the door. Nothing: it is this process's own, which needs no proof.
  void opened(LinkId link, const std::optional<PeerIdentity>& peer, Time now);
  void received(LinkId link, const Message& message, Time now);
  void closed(LinkId link, Time now);
  // A failure that this process itself has found, which is no rank. With the tag of a generation
  // that has ended it counts nothing: its ranks are others' now.
  void report(const Error& seen, std::optional<std::uint32_t> generation, Time now);
  // How the process of a member on this host has ended, as its launcher saw. Says more than that
  // its connection has closed.
  void process_ended(const HostIdentity& host, std::int32_t pid, const std::string& how,
                     bool own_fault);
  // Wants something of all ranks, for as long as the job lives: rank 0 passes it on.
  void wish(const Wish& wish) { wish_ = wish; }
  // Has all ranks write what they did last, but for these processes of a host.
  void ask_flight(const HostIdentity& host, const std::vector<std::int32_t>& but);
  // The machine was suspended for so long, by a clock that stood still meanwhile. Before any event
  // that has come since.
  void machine_slept(Clock::duration time) {
    last_event_ -= time;
    last_word_ -= time;
  }
  // To be called at wake_at() at the latest, after all events that happened before.
  void tick(Time now);
  // Says goodbye to all; a verdict that is still open is decided first. `progress` is that of this
  // process's own rank.
  void leave(const std::vector<Progress>& progress, Time now);

  Time wake_at() const;

  // What is to be sent, in order. The link closes once its last message is sent.
  struct Sending {
    LinkId link;
    SharedBytes bytes;
    bool last = false;
  };
  std::vector<Sending> take_sendings() { return std::exchange(sendings_, {}); }
  std::vector<MemberEvent> take_events() { return std::exchange(events_, {}); }
  // What rank 0 has told of the run, line by line.
  std::vector<std::string> take_lines() { return std::exchange(lines_, {}); }
  // Who came to a job that will never form, and what it was told.
  std::vector<std::string> take_refusals() { return std::exchange(refusals_, {}); }

  // Of the newest generation, once there is one.
  const std::optional<RosterMessage>& roster() const { return roster_; }
  // Why the job has failed for all.
  const std::optional<Error>& verdict() const { return verdict_; }
  // This process stood still for the timeout, and its members have gone to another centre. It is to
  // be destroyed; all its links are closed.
  bool resigned() const { return resigned_; }
  // Whether a generation has formed, or somebody has joined and waits for the others.
  bool has_members() const { return phase_ != Phase::kGathering || !gathering_.empty(); }
  // Whether a generation has formed and all its members have gone in good order.
  bool all_left() const;
  // The most steps that a member has done, as they told when they joined.
  std::int64_t step() const { return step_; }

 private:
  enum class Phase : std::uint8_t { kGathering, kRunning, kRegrouping, kForming };
  // The other end of a link.
  struct Peer {
    std::optional<PeerIdentity> proved;
    std::optional<Join> join;  // its last one
    int rank = -1;             // in the newest generation; -1: not in it
    bool invited = false;      // it knows what the job was to be, not what it is
    Time limit;                // by which it must have asked
    Time heard;
    std::optional<Time> back = {};  // first heard after this process stood still
    bool spare = false;             // it has been told that there is no lane for it
  };
  using Peers = std::map<LinkId, Peer>;
  // A rank of the newest generation.
  struct Place {
    Card card;
    std::optional<LinkId> link = {};
    bool gone = false;
    bool left = false;         // in good order; then it is gone, too
    bool failed = false;       // by its own fault, as it said
    bool lost_us = false;      // it lost this centre, as it said
    Departure departure = {};  // once it is gone, or its process is known to have ended
    // While the next generation is under way:
    bool answered = false;  // it has joined again
    bool waits = false;     // for more workers
    bool enters = false;    // it was in no generation that has begun
    bool ready = false;     // for collectives of the new generation
  };

  void join(Peers::iterator peer, const Message& message, Time now);
  void gather(Peers::iterator peer, const Join& join, Time now);
  bool close_older_links(LinkId link, const MemberId& id);
  void take_link(int rank, LinkId link);
  void answer(int rank, const Join& join);
  void welcome(Peers::iterator peer);
  void prepare(LinkId link);
  void unprepare(LinkId link);
  std::optional<Error> refusal(const Card& card) const;
  std::optional<Error> reach_refusal(const Card& card) const;
  void dismiss_out_of_reach();
  std::optional<int> place_of(const Join& join) const;
  std::optional<int> place_with(const MemberId& id) const;
  void dismiss(LinkId link, const Error& error);
  void forget(Peers::iterator peer);
  void hang_up(Peers::iterator peer);
  void hear(int rank, const Message& message, Time now);
  void hear_between(int rank, const Message& message, Time now);

  void start_job(Time now);
  RosterMessage message_of(Roster roster) const;
  void end_job(const Error& verdict);
  // A member is lost: the generation ends, or the job does.
  void lose(const Error& why, Time now);
  void take_away(int rank, Departure::Kind kind, const std::string& why);
  void end_generation(const Error& why, Time now);
  void start_regrouping(Time now);
  void expect_again(const Join& join, Time now);
  void judge_silence(Time now);
  void forget_silent_newcomers(Time now);
  void notice_pause(Time now);
  bool in_doubt(Time now) const;
  void miss(int rank, Time now);
  void resign();
  void form_if_complete(Time now);
  void form(const std::vector<LinkId>& newcomers, bool too_few, Time now);
  void send_rosters(const RosterChange& change, std::size_t survivors);
  void go_if_ready();
  std::size_t most_members() const;
  bool can_enter(LinkId link, Time now) const;
  std::vector<LinkId> newcomers(std::size_t survivors, Time now) const;
  bool newcomers_wait(Time now) const;
  void tell_spares();
  void set_places(std::vector<Place> places);
  void set_reach();

  void send(LinkId link, MessageKind kind, std::span<const std::byte> body, bool last = false);
  void send_to_all(MessageKind kind, std::span<const std::byte> body);
  void send_wish(Time now);
  Clock::duration between_heartbeats() const;
  void decide(Time now);
  bool in_generation() const { return phase_ == Phase::kRunning || phase_ == Phase::kForming; }
  std::uint32_t tag() const { return tag_of(generation_); }
  Place& place(int rank) { return places_[index_of(rank)]; }

  const CentreOptions options_;
  Phase phase_ = Phase::kGathering;
  Peers peers_;
  std::set<std::pair<Time, LinkId>> silent_;  // those who have not asked to join yet
  std::map<LinkId, MemberId> prepared_;       // newcomers that can be let in
  std::set<std::pair<MemberId, LinkId>> links_of_prepared_;
  Gathering gathering_;

  // Of the newest generation.
  GenerationName generation_;
  std::optional<RosterMessage> roster_;  // none, too, where only its members know it
  std::vector<Place> places_;
  std::map<MemberId, int> ranks_;    // of places_; may name one that is gone
  Reach reach_;                      // of places_, while in_generation()
  std::optional<JobHealth> health_;  // while in_generation()

  // While the next generation is under way.
  Time since_{};  // when the one before ended, or the new one was sent out
  Time next_judgement_{};
  std::size_t awaited_ = 0;  // those who have not answered, or are not ready
  bool told_end_ = false;    // all who have not answered know that the one before has ended
  bool may_wait_ = false;    // too few have come, and all of them wait for others

  // What the members have told.
  bool survives_ = true;  // all of them do
  std::size_t min_workers_ = 1;
  Clock::duration patience_{};
  std::int64_t step_ = 0;
  std::optional<Description> description_;

  // This process stood still for the timeout until then. Until all members have been heard again
  // they may have another centre, and this one forms no generation.
  std::optional<Time> woke_;
  Time last_event_{};
  Time last_word_{};  // to all: when the last heartbeat was due
  Time in_doubt_until_{};
  bool resigned_ = false;

  Wish wish_;
  Wish told_;  // to the first rank of this generation
  std::optional<Error> verdict_;
  Time next_heartbeat_ = Time::max();
  std::vector<Sending> sendings_;
  std::vector<MemberEvent> events_;
  std::vector<std::string> lines_;
  std::vector<std::string> refusals_;
};

}  // namespace lockstep

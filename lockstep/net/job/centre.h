#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/net/job/gathering.h"
#include "lockstep/net/job/handshake.h"
#include "lockstep/net/job/job_health.h"
#include "lockstep/wire/join_messages.h"
#include "lockstep/wire/message.h"

namespace lockstep {

struct CentreOptions {
  CentreCard card;
  int world_size = 1;
  std::string version;
  Deadline::Clock::duration timeout{};
  // How long to wait for the members, who have a patience of their own; zero: the timeout.
  Deadline::Clock::duration patience{};
};

// The centre of a job: lets the members in, sends them the roster, then hears their heartbeats and
// tells all of them why the job failed. Gathering and JobHealth decide; this class turns what comes
// over the links into events for them, and what they decide into messages. Events and the time go
// in, messages come out; no I/O. Used by one thread.
//
// No event costs more the more members there are, save forming the job and messages to all.
class Centre {
 public:
  using Clock = Deadline::Clock;
  using Time = Clock::time_point;
  // Names a link for as long as it is open.
  using LinkId = std::uint64_t;

  Centre(CentreOptions options, Time now);

  // A member has come through the door. Nothing: it is this process's own, which needs no proof.
  void opened(LinkId link, const std::optional<PeerIdentity>& peer, Time now);
  void received(LinkId link, const Message& message, Time now);
  void closed(LinkId link, Time now);
  // A failure that this process itself has found, which is no rank.
  void report(const Error& seen, Time now);
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

  // Once all members are there.
  const std::optional<RosterMessage>& roster() const { return roster_; }
  const std::optional<Error>& verdict() const { return verdict_; }
  // Whether the job has formed and all its members have gone.
  bool all_left() const { return health_ && health_->all_left(); }

 private:
  // The other end of a link.
  struct Peer {
    std::optional<PeerIdentity> proved;
    std::optional<Card> card;  // once it has asked to join
    int rank = -1;             // once the job has formed
    Time limit;                // by which it must have asked
  };
  using Peers = std::map<LinkId, Peer>;

  void join(Peers::iterator peer, const Message& message, Time now);
  void dismiss(LinkId link, const Error& error);
  void forget(Peers::iterator peer);
  void hear(int rank, const Message& message, Time now);
  void start_job(Time now);
  void end_job(const Error& verdict);
  void send_to_all(MessageKind kind, std::span<const std::byte> body);
  void decide(Time now);

  const CentreOptions options_;
  Peers peers_;
  std::set<std::pair<Time, LinkId>> silent_;  // those who have not asked to join yet
  Gathering gathering_;
  std::optional<RosterMessage> roster_;  // once all are there
  std::optional<JobHealth> health_;      // from then on
  std::optional<Error> verdict_;
  Time next_heartbeat_ = Time::max();
  std::vector<Sending> sendings_;
};

}  // namespace lockstep

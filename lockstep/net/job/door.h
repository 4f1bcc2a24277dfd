#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/net/job/arrivals.h"
#include "lockstep/net/job/handshake.h"
#include "lockstep/net/job/link.h"
#include "lockstep/net/socket/poller.h"

namespace lockstep {

// A listener, and what its visitors may come for.
struct Entrance {
  Socket listener;  // TCP or unix
  std::vector<Purpose> purposes;
  // Peers of the original gradient protocol may come: this user's where there is no token, or
  // anybody with `insecure`.
  bool original = false;
  bool insecure = false;  // let in those who have no token, whoever they are
};

// Where all connections to this process arrive: accepts them, runs their handshakes side by side
// and hands on those that prove that they hold the job's secret. Visitors that are silent, slow,
// hostile or too many disturb nobody: work is done only for those that have sent something, each
// has a few seconds, and those of one address cannot crowd out the others. Never waits; used by one
// thread.
class Door {
 public:
  using Clock = Deadline::Clock;
  using Time = Clock::time_point;

  // `timeout` is the job's.
  Door(Identity identity, std::vector<Entrance> entrances, Clock::duration timeout);

  // An event loop waits until this descriptor is readable, or until wake_at(), then calls serve().
  int fd() const { return poller_.fd(); }
  Time wake_at() const;
  // Those who have come in.
  std::vector<Arrival> serve(Time now);
  // Callers of this generation are told that this process is `rank`; others get no rank.
  void set_place(std::uint32_t generation, int rank);

 private:
  // A connection whose handshake is under way.
  struct Visitor {
    Link link;
    std::size_t entrance;
    std::string address;  // whose share of the visitors it counts for
    Time limit;
    std::optional<Handshake> handshake = {};  // once its first message is here
    bool sending = false;                     // the poller tells when more can be sent
    bool leaving = false;                     // once its answer is sent
  };
  using Visitors = std::map<std::uint64_t, Visitor>;  // in the order in which they came

  void accept_visitors(std::size_t entrance, Time now);
  void admit(Socket socket, std::size_t entrance, Time now);
  void make_room(const std::string& address);
  void pause(Time now);
  void resume();
  void attend(Visitors::iterator visitor, std::vector<Arrival>& arrivals);
  // Whether the visitor speaks the original protocol; throws if it may not, or speaks neither.
  bool is_original(const Visitor& visitor) const;
  // Where there is no token, the handshake proves nothing. Throws if it is another user's.
  void require_own_user(const Visitor& visitor) const;
  void shake_hands(Visitor& visitor, const Message& message);
  Handshake make_handshake(const Visitor& visitor, const Message& first) const;
  Arrival let_in(Visitors::iterator visitor, bool original);
  void forget(Visitors::iterator visitor);
  void warn(std::string_view text);

  Identity identity_;  // its place in the newest generation
  // Constant after construction.
  const std::vector<Entrance> entrances_;
  const Clock::duration timeout_;

  Poller poller_;
  std::uint64_t next_key_;
  Visitors visitors_;
  std::map<std::string, std::set<std::uint64_t>> by_address_;  // keys of visitors_
  std::optional<Time> paused_until_;                           // no descriptors were left
  std::int64_t warnings_left_ = 20;                            // strangers must not fill the log
};

}  // namespace lockstep

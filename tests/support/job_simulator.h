#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <vector>

#include "lockstep/base/random.h"
#include "lockstep/net/job/centre.h"
#include "lockstep/net/job/member.h"
#include "tests/support/message_parser.h"

namespace lockstep::test {

// A job of many members around one centre in one thread, with virtual time: the real machines,
// joined by a network that delays. Every connection keeps its order; connections overtake each
// other as the seed has it. A member can be told to die, to fall silent for a while, to call
// something else or to leave.
class JobSimulator {
 public:
  using Clock = Deadline::Clock;
  using Time = Clock::time_point;

  struct Options {
    int members = 3;
    std::uint64_t seed = 1;
    Clock::duration timeout = std::chrono::seconds(10);
    Clock::duration longest_delay = std::chrono::milliseconds(2);
    bool gives_ranks = false;  // the members ask for none
  };

  explicit JobSimulator(const Options& options);

  // Things that happen, at once.
  void start(int member);
  void start_all();
  void kill(int member);  // its process ends: the kernel closes its link
  void stop(int member);  // it neither sends nor reads nor notices the time
  void wake(int member);
  void leave(int member);  // in good order
  void report(int member, const Error& error);
  void centre_leaves();  // in good order; its process ends
  // What the member does, as its heartbeats tell.
  void set_progress(int member, std::vector<Progress> progress);

  // Lets virtual time pass until `done`, at most for so long. Returns whether it was done.
  bool run_until(const std::function<bool()>& done, Clock::duration longest);
  void run_for(Clock::duration duration);

  Time now() const { return now_; }
  const Member& member(int index) const { return *members_[at(index)].machine; }
  const Centre& centre() const { return centre_; }
  bool all_formed() const;
  // The failure that all members which still run have, if all have the same.
  std::optional<Error> common_failure() const;

  // What went to and from the centre.
  std::uint64_t messages() const { return messages_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  // One direction of a link: what is on its way, in order.
  struct Way {
    Time last_arrival{};
  };
  struct Node {
    std::unique_ptr<Member> machine;
    std::vector<Progress> progress;
    bool running = false;
    bool stopped = false;
    bool linked = false;  // its end of the link is open
    Way to_centre;
    Way to_member;
    std::deque<std::function<void()>> unread;  // what has come while it was stopped
  };
  struct Event {
    Time time;
    std::uint64_t order;
    std::function<void()> action;
    bool operator>(const Event& other) const {
      return std::pair(time, order) > std::pair(other.time, other.order);
    }
  };

  static std::size_t at(int index) { return static_cast<std::size_t>(index); }
  static Centre::LinkId link_of(int member) { return static_cast<Centre::LinkId>(member) + 1; }
  static int member_of(Centre::LinkId link) { return static_cast<int>(link) - 1; }

  void schedule(Time time, std::function<void()> action);
  void deliver(Way& way, std::function<void()> action);
  void to_member(int member, std::function<void()> action);
  void close_from_member(int member);
  void close_from_centre(int member);
  // Sends what a machine wants sent, and makes sure that it is called when it wants to be.
  void carry_out(int member);
  void carry_out_centre();
  void wake_member(int member, Time time);
  void wake_centre(Time time);
  // The message in a frame; the one that goes to many is cut out once.

  const Options options_;
  Time now_ = Time{} + std::chrono::hours(1);
  std::uint64_t order_ = 0;
  std::uint64_t draws_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<Node> members_;
  std::map<int, Time> member_wakes_;  // the wake that is scheduled
  Time centre_wake_ = Time::max();
  Centre centre_;
  bool centre_gone_ = false;
  MessageParser parser_;
  std::uint64_t messages_ = 0;
  std::uint64_t bytes_ = 0;
};

}  // namespace lockstep::test

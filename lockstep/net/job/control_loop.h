#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/event.h"
#include "lockstep/base/thread.h"
#include "lockstep/net/job/arrivals.h"
#include "lockstep/net/job/centre.h"
#include "lockstep/net/job/door.h"
#include "lockstep/net/job/machine_sleep.h"
#include "lockstep/net/job/member.h"
#include "lockstep/net/job/supervisor.h"
#include "lockstep/net/socket/poller.h"

namespace lockstep {

// What the threads of a process share about a generation.
struct Watch {
  FailureLatch latch;  // trips when the generation ends, or the job
  ProgressBook book;   // of the generation's communicators
};

// What the control thread has heard of the generation that this process asked for last.
struct ControlNews {
  std::optional<RosterMessage> roster = {};
  bool may_go = false;                // all its members are ready
  std::optional<Error> failure = {};  // the job's
  // There is no way to the centre; perhaps somebody said where it is (Member::redirect).
  bool cut_off = false;
  std::optional<std::string> redirect = {};
  bool paused = false;                      // Member::paused()
  std::optional<Description> welcome = {};  // to a newcomer
};

// The control thread of a process. It moves bytes between sockets and the machines that decide: the
// Door, where this process listens, the Centre, if this process has it, and the Member, once this
// process has joined. The destructor says goodbye for both and does not wait for peers.
// Thread-safe.
class ControlLoop {
 public:
  // Door and centre may be null. The arrivals must outlive the loop.
  ControlLoop(std::shared_ptr<Watch> watch, Arrivals& arrivals, std::unique_ptr<Door> door,
              std::unique_ptr<Centre> centre);
  ~ControlLoop();
  ControlLoop(const ControlLoop&) = delete;
  ControlLoop& operator=(const ControlLoop&) = delete;

  // Joins over a link that has passed the handshake; without one, the centre of this process.
  // Another member of this process is forgotten: its link is of no use any more.
  void join(std::optional<Link> link, MemberOptions options);
  // Asks for the next generation over the link that is there. `watch` is the new one's.
  void join_again(std::shared_ptr<Watch> watch, Standing standing, std::int64_t step);
  // This process becomes the centre.
  void serve(std::unique_ptr<Centre> centre);
  void ready();
  void describe(Description description);
  // To all ranks of the job whose centre this process has.
  void wish(const Wish& wish);
  // As Centre::ask_flight; nothing where another process has the centre.
  void ask_flight(std::vector<std::int32_t> but);
  // Called on the control thread when the centre asks for it; must not wait.
  void on_flight_asked(std::function<void()> write);
  // As Centre::process_ended.
  void process_ended(std::int32_t pid, std::string how, bool own_fault);

  // Waits until `enough`, or until the deadline. Returns what is known then.
  ControlNews wait_for_news(const std::function<bool(const ControlNews&)>& enough,
                            Deadline deadline);
  // What the control thread knows after a turn that begins now.
  ControlNews news_of_a_turn(Deadline deadline);
  // What is known now.
  ControlNews news();
  // Of the process that has the centre: the newest roster, and what has become of members since.
  std::optional<RosterMessage> centre_roster();
  std::vector<MemberEvent> take_events();
  // What rank 0 has told of the run since the last call; of very many lines, the last ones.
  std::vector<std::string> take_lines();

  // A line for the centre's process, see Member::tell().
  void tell(std::string line);
  // Tells the centre of a failure; for the tag see Centre::report(), a rank's is its member's.
  // False if the centre cannot be reached.
  bool report(const Error& error, std::optional<std::uint32_t> generation = std::nullopt);
  // What the centre wants of this rank in this generation.
  Wish wanted();
  std::int64_t centre_step() const { return centre_step_.load(std::memory_order_relaxed); }

  // Of the job whose centre this process has.
  int members_fd() const { return members_.fd(); }
  bool all_left() const { return all_left_.load(std::memory_order_acquire); }
  // Whether the centre that this process had has gone elsewhere: see Centre::resigned().
  bool gave_role_up() const { return gave_role_up_.load(std::memory_order_acquire); }
  void wait_until_all_left(Deadline deadline);

  bool centre_left() const { return centre_left_.load(std::memory_order_acquire); }

 private:
  using Time = Deadline::Clock::time_point;

  // The centre's end of a link.
  struct CentreLink {
    Link link;
    bool sending = false;  // the poller tells when more can be sent
  };
  struct ProcessEnded {
    std::int32_t pid;
    std::string how;
    bool own_fault;
  };
  struct JoinAgain {
    std::shared_ptr<Watch> watch;
    Standing standing;
    std::int64_t step;
  };
  // What other threads hand in.
  struct Orders {
    std::unique_ptr<Centre> centre;
    std::unique_ptr<Member> member;
    std::optional<Link> link;  // of the member
    std::optional<JoinAgain> join_again;
    bool ready = false;
    std::optional<Description> description;
    std::optional<Wish> wish;
    std::optional<std::vector<std::int32_t>> ask_flight;  // but for these
    std::vector<ProcessEnded> ended;
    std::vector<std::string> lines;
    std::vector<std::pair<Error, std::optional<std::uint32_t>>> reports;
    bool stop = false;
  };

  void run();
  // One turn: waits, hears, decides, sends. Returns whether to go on.
  bool turn();
  bool take_orders(Time now);
  void end();

  Time wake_at() const;
  void admit(Arrival arrival, Time now);
  void add_centre_link(Link link, const std::optional<PeerIdentity>& peer, Time now);
  void serve_centre_link(std::uint64_t key, Time now);
  void serve_member(Time now);
  void send_for_centre(Time now);
  void give_role_up();
  void send_for_member();
  void order(const std::function<void(Orders&)>& change);
  // Tells a caller who looks for the centre where it is.
  void redirect(Link link) const;
  // Tells the other threads what has become known.
  void publish();

  Arrivals& arrivals_;
  const Event wake_;
  const Event members_;  // the centre has had one

  std::mutex mutex_;
  std::condition_variable changed_;
  Orders orders_;                               // guarded by mutex_
  ControlNews news_;                            // guarded by mutex_
  std::optional<RosterMessage> centre_roster_;  // guarded by mutex_
  std::vector<MemberEvent> events_;             // guarded by mutex_
  std::deque<std::string> lines_;               // guarded by mutex_; told by rank 0
  Wish wanted_;                                 // guarded by mutex_
  std::function<void()> write_flight_;          // guarded by mutex_
  std::uint64_t turns_ = 0;                     // guarded by mutex_; that are done
  bool ended_ = false;                          // guarded by mutex_; the thread has

  std::atomic<bool> connected_{false};
  std::atomic<bool> centre_left_{false};
  std::atomic<bool> all_left_{false};
  std::atomic<bool> gave_role_up_{false};
  std::atomic<std::int64_t> centre_step_{0};

  // Control thread only, as the rest.
  MachineSleep machine_sleep_;
  Deadline::Clock::duration slept_{};  // before this turn
  std::shared_ptr<Watch> watch_;
  std::unique_ptr<Door> door_;
  std::unique_ptr<Centre> centre_;
  std::unique_ptr<Member> member_;
  Poller poller_;
  std::uint64_t next_key_;
  std::map<std::uint64_t, CentreLink> centre_links_;
  std::optional<Link> member_link_;
  bool member_sending_ = false;
  bool had_members_ = false;  // members_ is set
  Thread thread_;
};

}  // namespace lockstep

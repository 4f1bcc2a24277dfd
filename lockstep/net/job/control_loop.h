#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "lockstep/base/event.h"
#include "lockstep/base/thread.h"
#include "lockstep/net/job/arrivals.h"
#include "lockstep/net/job/centre.h"
#include "lockstep/net/job/door.h"
#include "lockstep/net/job/member.h"
#include "lockstep/net/job/supervisor.h"
#include "lockstep/net/socket/poller.h"

namespace lockstep {

// The control thread of a process. It moves bytes between sockets and the machines that decide: the
// Door, where this process listens, the Centre, if this process has it, and the Member, once this
// process has joined. The destructor says goodbye for both and does not wait for peers.
// Thread-safe.
class ControlLoop {
 public:
  // Door and centre may be null. Latch, book and arrivals must outlive the loop.
  ControlLoop(FailureLatch& latch, const ProgressBook& book, Arrivals& arrivals,
              std::unique_ptr<Door> door, std::unique_ptr<Centre> centre);
  ~ControlLoop();
  ControlLoop(const ControlLoop&) = delete;
  ControlLoop& operator=(const ControlLoop&) = delete;

  // Joins over a link that has passed the handshake; without one, the centre of this process. Once.
  void join(std::optional<Link> link, MemberOptions options);
  // Waits until the job has formed; throws the latch's error if it fails before.
  RosterMessage wait_for_roster(Deadline deadline);

  // Tells the centre of a failure. False if the centre cannot be reached.
  bool report(const Error& error);

  // Of the job whose centre this process has.
  bool all_left() const { return all_left_.load(std::memory_order_acquire); }
  void wait_until_all_left(Deadline deadline);

  bool centre_left() const { return centre_left_.load(std::memory_order_acquire); }

 private:
  using Time = Deadline::Clock::time_point;

  // The centre's end of a link.
  struct CentreLink {
    Link link;
    bool sending = false;  // the poller tells when more can be sent
  };
  // What other threads hand in.
  struct Orders {
    std::unique_ptr<Member> member;
    std::optional<Link> link;  // of the member
    std::vector<Error> reports;
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
  void send_for_member();
  // Tells the other threads what has become known.
  void publish();

  FailureLatch& latch_;
  const ProgressBook& book_;
  Arrivals& arrivals_;
  const Event wake_;

  std::mutex mutex_;
  std::condition_variable formed_;
  Orders orders_;                        // guarded by mutex_
  std::optional<RosterMessage> roster_;  // guarded by mutex_; set once

  std::atomic<bool> connected_{false};
  std::atomic<bool> centre_left_{false};
  std::atomic<bool> all_left_{false};

  // Control thread only, as the rest.
  std::unique_ptr<Door> door_;
  std::unique_ptr<Centre> centre_;
  std::unique_ptr<Member> member_;
  Poller poller_;
  std::uint64_t next_key_;
  std::map<std::uint64_t, CentreLink> centre_links_;
  std::optional<Link> member_link_;
  bool member_sending_ = false;
  Thread thread_;
};

}  // namespace lockstep

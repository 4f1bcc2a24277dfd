#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>

#include "lockstep/base/event.h"
#include "lockstep/base/failure_latch.h"
#include "lockstep/net/job/handshake.h"
#include "lockstep/net/job/link.h"

namespace lockstep {

// A connection that has come through the door.
struct Arrival {
  // Over which the handshake went: the socket, and what has come behind the handshake.
  Link link;
  Purpose purpose{};
  PeerIdentity peer;      // proved
  bool original = false;  // a peer of the original gradient protocol, which proves nothing
};

// Connections to this process that nobody has taken yet. Thread-safe.
class Arrivals {
 public:
  // A newer connection of the same member, purpose and group takes the place of an older one.
  void deliver(Arrival arrival);

  // The oldest one, whoever opened it.
  std::optional<Arrival> next();
  // Readable while next() has one.
  int fd() const { return event_.fd(); }

  // The connection that a member has opened, or will open, for mesh or shared memory. `name` and
  // `rank` are the member's in Error{kTimeout} at the deadline; throws the latch's error if it
  // trips.
  Arrival wait_for(const MemberId& id, std::uint32_t group, const std::string& name, int rank,
                   Deadline deadline, const FailureLatch& latch);

 private:
  std::optional<Arrival> take(const MemberId& id, std::uint32_t group);

  const Event event_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Arrival> waiting_;  // guarded by mutex_; the oldest first
};

}  // namespace lockstep

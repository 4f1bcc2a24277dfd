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
  // A newer connection of the same member, purpose and group takes the place of an older one. Of
  // one member, and of all, only so many wait: then the oldest goes.
  void deliver(Arrival arrival);

  // The oldest one, whoever opened it.
  std::optional<Arrival> next();
  // Readable while next() has one.
  int fd() const { return event_.fd(); }

  // Whose connection is waited for: a member's, for a group of a generation.
  struct Awaited {
    MemberId id{};
    std::uint32_t generation = 0;  // its tag
    std::uint32_t group = 0;
    std::string name;  // of the member, as its rank
    int rank = -1;
    Purpose purpose = Purpose::kMesh;  // or kShared
  };
  // The connection that a member has opened, or will open, for mesh or shared memory.
  // Error{kTimeout} at the deadline names the member; throws the latch's error if it trips.
  Arrival wait_for(const Awaited& awaited, Deadline deadline, const FailureLatch& latch);

  // Whether wait_for() would return at once.
  bool is_there(const Awaited& awaited);

  // Closes what members have opened for other generations than this one, which begins now.
  void begin_generation(std::uint32_t tag);

 private:
  // Both with mutex_ held.
  std::deque<Arrival>::iterator find(const Awaited& awaited);
  std::optional<Arrival> take(const Awaited& awaited);

  const Event event_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Arrival> waiting_;  // guarded by mutex_; the oldest first
};

}  // namespace lockstep

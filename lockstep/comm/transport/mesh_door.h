#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "lockstep/base/event.h"
#include "lockstep/base/thread.h"
#include "lockstep/net/job/job.h"

namespace lockstep {

// Where a job's connections arrive: one thread accepts them on the rank's TCP and unix listeners,
// runs their handshakes side by side, so that a silent or hostile one disturbs nobody, and keeps
// each until it is fetched.
class MeshDoor {
 public:
  explicit MeshDoor(JoinedJob& job);
  ~MeshDoor();
  MeshDoor(const MeshDoor&) = delete;
  MeshDoor& operator=(const MeshDoor&) = delete;

  struct Arrival {
    Socket socket;
    Purpose purpose{};  // kMesh: TCP; kShared: unix
  };
  // The connection that job rank `peer` has opened, or will open, for `group`. Throws
  // Error{kTimeout} naming it at the deadline, or the latch's error.
  Arrival wait_for(int peer, std::uint32_t group, Deadline deadline);

 private:
  struct Visitor;  // a connection whose handshake is under way

  void serve();
  void admit(const Socket& listener, Purpose purpose, std::vector<Visitor>& visitors);
  // Moves a handshake on; false when the visitor is to be let go (arrived, refused or gone).
  bool attend(Visitor& visitor);
  void deliver(Visitor& visitor);

  JoinedJob& job_;
  const Event stop_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<std::pair<std::uint32_t, int>, Arrival> arrivals_;  // guarded by mutex_
  Thread thread_;                                              // last: it uses all of the above
};

}  // namespace lockstep

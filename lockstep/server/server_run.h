#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>

#include "lockstep/base/event.h"
#include "lockstep/base/thread.h"
#include "lockstep/server/rank_server.h"

namespace lockstep {

// A gradient server for ranks, on a thread of its own, until all have left. Signals are left to
// other threads.
class ServerRun {
 public:
  // This process is the centre of the job, for which job.world_size ranks come to the listener.
  ServerRun(Socket listener, HostOptions job, std::size_t window = RankServerOptions().window);
  ~ServerRun();
  ServerRun(const ServerRun&) = delete;
  ServerRun& operator=(const ServerRun&) = delete;

  // Where ranks find it.
  const SocketAddress& address() const { return address_; }
  // The centre of the job; gone once all ranks have left.
  std::weak_ptr<ControlPlane> control() const { return shared_control_; }

  // Waits for its end until the deadline, then stops it. Returns what went wrong; that it had to be
  // stopped is no error.
  std::optional<Error> finish(Deadline deadline);

 private:
  // Constant after construction.
  SocketAddress address_;
  const Event stop_;
  std::shared_ptr<ControlPlane> control_;  // as server_
  std::weak_ptr<ControlPlane> shared_control_;
  std::unique_ptr<RankServer> server_;  // used by thread_ alone once it runs

  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;           // guarded by mutex_
  std::optional<Error> error_;  // guarded by mutex_
  Thread thread_;
};

}  // namespace lockstep

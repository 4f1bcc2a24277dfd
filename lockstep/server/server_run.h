#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "lockstep/base/event.h"
#include "lockstep/base/index.h"
#include "lockstep/base/thread.h"
#include "lockstep/server/gradient_server.h"

namespace lockstep {

// A gradient server for ranks, on a thread of its own, until all have left. Signals are left to
// other threads.
class ServerRun {
 public:
  ServerRun(Socket listener, const ServerOptions& options);
  // For workers of this process: join_star(end(i), …) on a thread of its own each.
  explicit ServerRun(const ServerOptions& options);
  ~ServerRun();
  ServerRun(const ServerRun&) = delete;
  ServerRun& operator=(const ServerRun&) = delete;

  // Where workers find it.
  const SocketAddress& address() const { return address_; }
  // To be taken once for every worker.
  Socket end(int worker) { return std::move(ends_[index_of(worker)]); }

  // Waits for its end until the deadline, then stops it. Returns what went wrong; that it had to be
  // stopped is no error.
  std::optional<Error> finish(Deadline deadline);

 private:
  void start();

  // Constant after construction.
  SocketAddress address_;
  const Event stop_;
  std::unique_ptr<GradientServer> server_;  // used by thread_ alone once it runs
  std::vector<Socket> ends_;

  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;           // guarded by mutex_
  std::optional<Error> error_;  // guarded by mutex_
  Thread thread_;
};

}  // namespace lockstep

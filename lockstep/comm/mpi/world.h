#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/comm/mpi/call.h"
#include "lockstep/comm/mpi/mpi.h"
#include "lockstep/net/job/job.h"

namespace lockstep {

class MpiGroup;

// This process's place in its MPI world: one for the process, from the first join() to exit.
class MpiWorld {
 public:
  // Starts MPI unless somebody has. Throws if the other ranks do not come within the timeout.
  static MpiWorld& join(const MpiOptions& options);
  explicit MpiWorld(const MpiOptions& options);
  ~MpiWorld();
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  std::string name_of(int rank) const { return lockstep::name_of(job_.roster[rank]); }
  ControlPlane& control() const { return *job_.control; }
  bool oversubscribed() const { return oversubscribed_; }
  std::chrono::nanoseconds timeout() const { return timeout_; }

  // A group of all ranks with a communicator of its own. Collective.
  std::unique_ptr<MpiGroup> group();

  // Keeps what MPI may still read until it has been sent: whoever sent it does not wait.
  void keep_until_sent(MPI_Request request, std::unique_ptr<std::byte[]> bytes);

  // Whether MPI may still be called: no failure, no exit.
  bool usable() const;

  // Before MPI_Finalize: waits until all ranks have come here, then takes leave of them.
  void leave();
  // Whether MPI_Finalize is left out, because it might hang between hosts.
  bool skips_finalize() const;

 private:
  struct Sending {
    MPI_Request request;
    std::unique_ptr<std::byte[]> bytes;
  };

  MPI_Comm duplicate(MPI_Comm comm, const FailureLatch* latch, Deadline deadline) const;
  // Waits for the others at one step of joining.
  void meet(MPI_Request& request, const FailureLatch* latch, Deadline deadline,
            const char* step) const;
  void compare_hosts(Deadline deadline);
  void join_job(const MpiOptions& options, Deadline deadline);

  // Constant after construction.
  const std::chrono::nanoseconds timeout_;
  int rank_ = 0;
  int world_size_ = 1;
  MPI_Comm comm_ = MPI_COMM_NULL;  // ours alone
  bool one_host_ = true;
  bool oversubscribed_ = false;
  JoinedJob job_;

  std::mutex mutex_;
  std::vector<Sending> sending_;  // guarded by mutex_
};

}  // namespace lockstep

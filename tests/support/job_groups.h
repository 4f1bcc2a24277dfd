#pragma once

#include <memory>
#include <optional>

#include "lockstep/comm/transport/transport.h"
#include "lockstep/net/socket/socket.h"

namespace lockstep::test {

struct GroupOptions;

// Where the ranks of a test meet: a listener on a port that the system chose.
class Rendezvous {
 public:
  explicit Rendezvous(const GroupOptions& options);

  // Joins the job as `rank`, on a thread of its own: returns when all ranks have.
  std::unique_ptr<Transport> join(const GroupOptions& options, int rank);

 private:
  Socket listener_;  // rank 0 takes it
  std::uint16_t port_ = 0;
};

}  // namespace lockstep::test

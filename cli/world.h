#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "cli/rank_environment.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/net/job/job.h"

namespace lockstep::cli {

enum class TransportKind : std::uint8_t { kLocal, kTcp, kShm, kAuto, kMpi, kServer };

std::string_view to_string(TransportKind kind);

struct WorldOptions {
  TransportKind transport = TransportKind::kAuto;
  std::chrono::nanoseconds timeout = std::chrono::seconds(30);
  std::string token;
  std::string interface;
};

// The communicator of the ranks that were started together, over TCP, shared memory or whichever
// fits; they meet as the environment says.
std::unique_ptr<Communicator> join_world(const WorldOptions& options,
                                         const RankEnvironment& environment);
// The MPI world that mpirun started; `native` chooses MPI's own collectives.
std::unique_ptr<Communicator> join_mpi_world(const WorldOptions& options, bool native);

// The first line of a file. Throws Error{kInvalidArgument} if there is none or it is empty.
std::string read_token_file(const std::string& path);

}  // namespace lockstep::cli

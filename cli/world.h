#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "cli/rank_environment.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/net/job.h"

namespace lockstep::cli {

enum class TransportKind : std::uint8_t { kLocal, kTcp, kShm, kAuto, kMpi };

std::string_view to_string(TransportKind kind);

struct WorldOptions {
  TransportKind transport = TransportKind::kAuto;
  std::chrono::nanoseconds timeout = std::chrono::seconds(30);
  std::string token;
  std::string interface;
};

// This process's place among the ranks that were started together: the communicator of all, which
// tells the job's supervisor what it is doing.
class World {
 public:
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // Over TCP, shared memory or whichever fits; the ranks meet as the environment says.
  static std::unique_ptr<World> join(const WorldOptions& options,
                                     const RankEnvironment& environment);

  Communicator& communicator() { return communicator_; }

 private:
  World(std::unique_ptr<Engine> engine, ControlPlane* control, std::chrono::nanoseconds timeout);

  ControlPlane* const control_;  // belongs to the communicator's engine
  Communicator communicator_;
};

// The first line of a file. Throws Error{kInvalidArgument} if there is none or it is empty.
std::string read_token_file(const std::string& path);

}  // namespace lockstep::cli

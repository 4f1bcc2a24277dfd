#pragma once

#include <sys/types.h>

#include <csignal>
#include <optional>
#include <string>

#include "lockstep/launch/launch.h"
#include "lockstep/net/socket/address.h"

namespace lockstep {

// What one rank is told at its start, and what it inherits.
struct RankSetup {
  int place = 0;
  bool newcomer = false;  // it gets its rank from the job
  std::string attempt;
  std::optional<HostPort> rendezvous;
  // Descriptors. Of the secret, or -1; of its flight recorder's memory; of what is its stderr.
  int secret = -1;
  int flight = -1;
  int messages = -1;
  sigset_t signals{};  // that it blocks
};

// The ranks of the job that these options begin.
int world_size(const LaunchOptions& options);

// Forks, and runs the program of the options as this rank, on its share of the cores. It ends with
// this process. Throws Error{kIo}.
pid_t start_rank(const RankSetup& setup, const LaunchOptions& options);

}  // namespace lockstep

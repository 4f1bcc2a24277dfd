#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// How a launcher tells a process which rank it is: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
// MASTER_PORT as torchrun sets them; the first three may come from Open MPI's, MPICH's or Slurm's
// launcher instead, and under Slurm the ranks can do without the other two. In an indexed Job of
// Kubernetes the rank is the number of the pod.
inline constexpr const char* kRankVariable = "RANK";
inline constexpr const char* kWorldSizeVariable = "WORLD_SIZE";
inline constexpr const char* kLocalRankVariable = "LOCAL_RANK";
inline constexpr const char* kMasterHostVariable = "MASTER_ADDR";
inline constexpr const char* kMasterPortVariable = "MASTER_PORT";
// A launcher may hand rank 0 the listening socket of the rendezvous under this number, so that
// nobody can take the port in between.
inline constexpr const char* kListenerVariable = "LOCKSTEP_RENDEZVOUS_FD";
// Our own launcher serves the rendezvous itself, and says so with this.
inline constexpr const char* kHostedVariable = "LOCKSTEP_HOSTED";
// It names this start of the job, and hands its secret down in a file of this number.
inline constexpr const char* kAttemptVariable = "LOCKSTEP_ATTEMPT";
inline constexpr const char* kSecretVariable = "LOCKSTEP_SECRET_FD";
// Memory that it shares with the rank, for the rank's flight recorder: a descriptor.
inline constexpr const char* kFlightMemoryVariable = "LOCKSTEP_FLIGHT_FD";
// Where ranks without a folder of their own write what they did last; from our launcher or the
// user.
inline constexpr const char* kFlightFolderVariable = "LOCKSTEP_FLIGHT_DIR";
// The place of a rank among those of our launcher.
inline constexpr const char* kLaunchedVariable = "LOCKSTEP_LAUNCHED_RANK";
// A worker that our launcher starts for a job that runs already: it has no rank yet.
inline constexpr const char* kNewcomerVariable = "LOCKSTEP_NEWCOMER";
// What `lockstep launch` hands to the launcher of a host: the job's secret in a file of this
// number, and where it reads what becomes of the job, a line for each: the port where it listens,
// "formed".
inline constexpr const char* kTokenFileVariable = "LOCKSTEP_TOKEN_FD";
inline constexpr const char* kStatusVariable = "LOCKSTEP_STATUS_FD";
// The job's secret, from the user.
inline constexpr const char* kTokenVariable = "LOCKSTEP_TOKEN";

struct RankEnvironment {
  int rank = 0;                   // -1: a newcomer, whom the job gives one
  int world_size = 1;             // 0, likewise
  std::optional<int> local_rank;  // among the ranks of this host
  std::string master_host;
  std::uint16_t master_port = 0;
  std::optional<int> listener;  // owned by whoever takes it
  std::optional<int> flight;    // likewise; memory of our own launcher
  bool hosted = false;          // the launcher serves the rendezvous, not rank 0
  std::string attempt;          // names this start of the job; empty: the launcher does not tell
  std::string secret;           // of our own launcher; empty: there is none
  // Kubernetes: the hosts of the other ranks, where each listens at master_port.
  std::vector<std::string> peers;

  bool newcomer() const { return rank < 0; }
};

// Nothing if no launcher started this process. Throws Error{kInvalidArgument} that names the
// variable which is missing or makes no sense.
std::optional<RankEnvironment> rank_environment();

// Whether Kubernetes started this process: it starts another in place of one that has not ended
// with 0.
bool started_by_kubernetes();

// The hosts of ranks 1 to `world_size` - 1, by that of rank 0 in an indexed Job: "train-0.net" is
// followed by "train-1.net". None if it is called otherwise.
std::vector<std::string> pods_after(std::string_view first, int world_size);

// What the members of one start of a job call it in their handshakes.
std::string job_name(const std::string& name, const std::string& attempt);

// The job's secret from the first line of a file. Warns where others can read it. Throws
// Error{kInvalidArgument} if there is none or it is empty.
std::string read_token_file(const std::string& path);

// The secret that `lockstep launch` has handed down; empty if it has not started this process.
std::string launched_token();

// The first host of a list as Slurm writes it: "node[01-04,7],login" is node01 to node04, node7 and
// login. Nothing if it is malformed.
std::optional<std::string> first_host(std::string_view list);

}  // namespace lockstep

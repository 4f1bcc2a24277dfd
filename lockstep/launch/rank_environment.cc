#include "lockstep/launch/rank_environment.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/utf8.h"
#include "lockstep/net/job/roster.h"

namespace lockstep {
namespace {

struct Names {
  const char* rank;
  const char* world_size;
  const char* local_rank;
};
constexpr Names kLaunchers[] = {
    {kRankVariable, kWorldSizeVariable, kLocalRankVariable},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
};
constexpr Names kSlurm = {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"};
// An indexed Job numbers its pods; how many there are its manifest has to say.
constexpr Names kKubernetes = {"JOB_COMPLETION_INDEX", kWorldSizeVariable, kLocalRankVariable};
constexpr const char* kSlurmNodes = "SLURM_JOB_NODELIST";
constexpr const char* kSlurmJob = "SLURM_JOB_ID";
constexpr const char* kSlurmStep = "SLURM_STEP_ID";

// torchrun's own agent listens at MASTER_PORT where this says so; the ranks meet next door.
bool agent_has_the_port() {
  const char* value = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  return value != nullptr && std::string_view(value) == "True";
}

bool is_set(const char* name) { return std::getenv(name) != nullptr; }

int number_in(const char* name, int least, int most) {
  const char* value = std::getenv(name);
  if (value == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the environment is incomplete: {} is not set", name));
  }
  const std::string_view text(value);
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < least || number > most) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}={} is not a number from {} to {}", name, text, least, most));
  }
  return number;
}

// A job's batch script or interactive shell has a number among the tasks, too, but is no task: it
// has no step, or one of the largest numbers there are.
bool started_by_srun() {
  if (!is_set(kSlurm.rank)) return false;
  const char* step = std::getenv(kSlurmStep);
  if (step == nullptr) return !is_set(kSlurmJob);
  constexpr unsigned long kNoTasks = 0xfffffff0;
  return std::strtoul(step, nullptr, 10) < kNoTasks;
}

std::optional<Names> find_launcher() {
  if (started_by_kubernetes()) return kKubernetes;
  for (const Names& names : kLaunchers) {
    if (is_set(names.rank) || is_set(names.world_size)) return names;
  }
  if (started_by_srun()) return kSlurm;
  return std::nullopt;
}

// What tells this start of the job from an earlier one, alike on all ranks. (How often torchrun has
// started a job anew is not alike on all hosts.)
std::string attempt_name() {
  const auto value = [](const char* name) {
    const char* text = std::getenv(name);
    return std::string(text != nullptr ? text : "");
  };
  if (is_set(kAttemptVariable)) return value(kAttemptVariable);
  if (const std::string run = value("TORCHELASTIC_RUN_ID"); !run.empty() && run != "none") {
    return "torchrun " + run;
  }
  if (const std::string space = value("PMIX_NAMESPACE"); !space.empty()) return "pmix " + space;
  if (started_by_srun() && is_set(kSlurmJob)) {
    return fmt::format("slurm {}.{}, start {}", value(kSlurmJob), value(kSlurmStep),
                       value("SLURM_RESTART_COUNT"));
  }
  return "";
}

// A secret from a file that we have inherited under the number that the variable has.
std::string inherited_text(const char* variable) {
  const int file = number_in(variable, 3, 1 << 20);
  std::array<char, 256> text{};
  const ssize_t size = ::pread(file, text.data(), text.size(), 0);
  if (size <= 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}={} is no file with a secret", variable, file));
  }
  return {text.data(), static_cast<std::size_t>(size)};
}

// Our launcher's secret; not for those that this process starts.
std::string inherited_secret() {
  if (!is_set(kSecretVariable)) return "";
  ::fcntl(number_in(kSecretVariable, 3, 1 << 20), F_SETFD, FD_CLOEXEC);
  return inherited_text(kSecretVariable);
}

// Memory of our launcher for the flight recorder; whoever opens it first has it.
std::optional<int> inherited_flight() {
  if (!is_set(kFlightMemoryVariable)) return std::nullopt;
  const int file = number_in(kFlightMemoryVariable, 3, 1 << 20);
  ::fcntl(file, F_SETFD, FD_CLOEXEC);
  return file;
}

// A port that all ranks of a job derive alike, below those that systems hand out themselves.
std::uint16_t port_for(std::uint64_t number) {
  constexpr std::uint64_t kFirst = 10000;
  constexpr std::uint64_t kPorts = 20000;
  return static_cast<std::uint16_t>(kFirst + number % kPorts);
}

// Where the ranks of a Slurm job can meet without being told: all derive the same.
void meet_by_slurm(RankEnvironment& found) {
  const char* nodes = std::getenv(kSlurmNodes);
  if (nodes == nullptr) return;
  const auto host = first_host(nodes);
  if (!host) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}={} is no list of hosts", kSlurmNodes, nodes));
  }
  found.master_host = *host;
  const auto job = static_cast<std::uint64_t>(number_in(kSlurmJob, 0, INT32_MAX));
  const auto step =
      is_set(kSlurmStep) ? static_cast<std::uint64_t>(number_in(kSlurmStep, 0, INT32_MAX)) : 0;
  found.master_port = port_for(job + 1009 * step);
}

// Without MASTER_ADDR the options say where the job is: at a gradient server.
RankEnvironment newcomer_environment() {
  RankEnvironment found;
  found.rank = -1;
  found.world_size = 0;
  if (is_set(kLocalRankVariable)) {
    found.local_rank = number_in(kLocalRankVariable, 0, kMaxWorldSize - 1);
  }
  found.hosted = true;
  found.attempt = utf8_prefix(repair_utf8(attempt_name(), "?"), kMaxJobName / 2);
  found.secret = inherited_secret();
  found.flight = inherited_flight();
  if (const char* host = std::getenv(kMasterHostVariable)) {
    found.master_host = host;
    found.master_port = static_cast<std::uint16_t>(number_in(kMasterPortVariable, 1, 65535));
  }
  return found;
}

}  // namespace

std::optional<RankEnvironment> rank_environment() {
  if (is_set(kNewcomerVariable)) return newcomer_environment();
  const auto names = find_launcher();
  if (!names) return std::nullopt;
  RankEnvironment found;
  found.world_size = number_in(names->world_size, 1, kMaxWorldSize);
  found.rank = number_in(names->rank, 0, found.world_size - 1);
  if (is_set(names->local_rank)) {
    found.local_rank = number_in(names->local_rank, 0, found.world_size - 1);
  }
  found.attempt = utf8_prefix(repair_utf8(attempt_name(), "?"), kMaxJobName / 2);
  found.secret = inherited_secret();
  found.flight = inherited_flight();
  found.hosted = is_set(kHostedVariable);
  if (found.world_size == 1 && !found.hosted) return found;  // others may come where it is hosted
  if (is_set(kListenerVariable) && found.rank == 0) {
    found.listener = number_in(kListenerVariable, 3, 1 << 20);
  }
  if (const char* host = std::getenv(kMasterHostVariable)) {
    found.master_host = host;
    found.master_port = static_cast<std::uint16_t>(number_in(kMasterPortVariable, 1, 65535));
    if (agent_has_the_port()) found.master_port = port_for(found.master_port);
    if (started_by_kubernetes()) found.peers = pods_after(found.master_host, found.world_size);
  } else if (started_by_srun()) {
    meet_by_slurm(found);
  }
  return found;
}

// Whoever sets RANK, too, has started processes of its own in the pod.
bool started_by_kubernetes() {
  return is_set(kKubernetes.rank) && is_set(kKubernetes.world_size) && !is_set(kRankVariable);
}

std::vector<std::string> pods_after(std::string_view first, int world_size) {
  const std::size_t dot = std::min(first.find('.'), first.size());
  const std::string_view name = first.substr(0, dot);
  std::vector<std::string> pods;
  if (!name.ends_with("-0")) return pods;
  for (int rank = 1; rank < world_size; ++rank) {
    pods.push_back(fmt::format("{}{}{}", name.substr(0, dot - 1), rank, first.substr(dot)));
  }
  return pods;
}

std::string job_name(const std::string& name, const std::string& attempt) {
  return attempt.empty() ? name : fmt::format("{} ({})", name, attempt);
}

std::string read_token_file(const std::string& path) {
  struct stat entry {};
  if (::stat(path.c_str(), &entry) == 0 && S_ISREG(entry.st_mode) &&
      (entry.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    log(LogLevel::kWarning,
        "{} has mode {:04o}: others on this host can have the job's token; chmod 600 it", path,
        entry.st_mode & 07777);
  }
  std::ifstream file(path);
  if (!file) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("opening {}: {}", path, std::strerror(errno)));
  }
  std::string token;
  std::getline(file, token);
  if (token.ends_with('\r')) token.pop_back();  // lines may end as on Windows
  if (token.empty()) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} holds no token", path));
  }
  return token;
}

std::string launched_token() {
  return is_set(kTokenFileVariable) ? inherited_text(kTokenFileVariable) : "";
}

std::optional<std::string> first_host(std::string_view list) {
  std::string host;
  while (!list.empty() && list.front() != ',') {
    if (list.front() == ']') return std::nullopt;
    if (list.front() != '[') {
      host += list.front();
      list.remove_prefix(1);
      continue;
    }
    const std::size_t end = list.find(']');
    if (end == std::string_view::npos) return std::nullopt;
    const std::string_view first = list.substr(1, list.find_first_of("-,]") - 1);
    if (first.empty() || first.find_first_not_of("0123456789") != std::string_view::npos) {
      return std::nullopt;
    }
    host += first;
    list.remove_prefix(end + 1);
  }
  if (host.empty()) return std::nullopt;
  return host;
}

}  // namespace lockstep

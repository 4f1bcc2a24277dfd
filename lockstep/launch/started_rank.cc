#include "lockstep/launch/started_rank.h"

#include <fmt/format.h>
#include <sys/wait.h>

#include <csignal>

#include "lockstep/base/exit_code.h"
#include "lockstep/launch/restart_policy.h"

namespace lockstep {

bool StartedRank::reap(int flags) {
  if (!running || ::waitpid(pid, &status, flags) != pid) return false;
  running = false;
  if (!was_killed() && exit_code() == kExitLeft) {
    left = true;
    status = 0;
  }
  return true;
}

// Without taking notice, so that it is seen again.
bool StartedRank::is_stopped() const {
  siginfo_t seen{};
  const int result = ::waitid(P_PID, static_cast<id_t>(pid), &seen, WSTOPPED | WNOHANG | WNOWAIT);
  return result == 0 && seen.si_pid == pid;
}

bool StartedRank::has_begun_lanes() {
  if (!first_step && flight) has_gone_on();
  return first_step.has_value();
}

void StartedRank::give_flight_back() {
  has_begun_lanes();
  flight.reset();
}

bool StartedRank::has_gone_on() {
  bool later = false;
  for (const FlightSnapshot::Phase& phase : flight->snapshot().phases) {
    if (phase.lane < 0) continue;
    if (!first_step) first_step = phase.step;
    later = later || phase.step > *first_step;
  }
  return later;
}

bool StartedRank::was_killed() const { return WIFSIGNALED(status); }

int StartedRank::exit_code() const { return WEXITSTATUS(status); }

bool StartedRank::ended_as_told() const {
  const int signal = was_killed() ? WTERMSIG(status) : exit_code() - 128;
  return signal == SIGINT || signal == SIGTERM || signal == SIGHUP;
}

bool StartedRank::ended_for_all() const {
  return !was_killed() && (exit_code() == kExitUsage || exit_code() == kExitHalted);
}

Evidence StartedRank::evidence() const {
  if (was_killed()) return Evidence::kKilled;
  return exit_code() == kExitEcho ? Evidence::kEcho : Evidence::kOwn;
}

std::string StartedRank::describe_end() const {
  const std::string who = rank < 0 ? fmt::format("a newcomer (pid {})", pid)
                                   : fmt::format("rank {} (pid {})", rank, pid);
  return fmt::format("{} {}", who, to_string(ProcessEnd::of(status)));
}

}  // namespace lockstep

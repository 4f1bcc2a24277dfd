#include "lockstep/launch/restart_policy.h"

#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <cstring>

#include "lockstep/base/exit_code.h"

namespace lockstep {
namespace {

bool asks_to_end(int signal) { return signal == SIGINT || signal == SIGTERM || signal == SIGHUP; }

// After wrong usage and a halt, starting the command again would end the same.
bool ended_in_order(const ProcessEnd& end) {
  if (end.killed) return asks_to_end(end.number);
  return end.number == 0 || end.number == kExitUsage || end.number == kExitHalted ||
         asks_to_end(end.number - 128);
}

}  // namespace

ProcessEnd ProcessEnd::of(int status) {
  if (WIFSIGNALED(status)) return {true, WTERMSIG(status)};
  return {false, WEXITSTATUS(status)};
}

bool ProcessEnd::own_fault() const {
  if (!killed) return number != 0;
  return number == SIGSEGV || number == SIGBUS || number == SIGABRT || number == SIGILL ||
         number == SIGFPE;
}

std::string to_string(const ProcessEnd& end) {
  if (!end.killed) return fmt::format("failed, with exit code {}", end.number);
  return fmt::format("was killed by signal {} ({})", end.number, strsignal(end.number));
}

void RestartPolicy::started(int place, Time now) {
  Place& found = places_[place];
  found.started = now;
  found.due.reset();
}

void RestartPolicy::took_part(int place) { places_[place].starts = 0; }

bool RestartPolicy::ended(int place, const ProcessEnd& end, Time now) {
  if (stopped_ || ended_in_order(end)) return false;
  Place& found = places_[place];
  const bool fresh = found.pause.count() == 0 || now - found.started >= kLastsWell;
  found.pause = fresh ? kFirstPause : std::min(2 * found.pause, kLongestPause);
  found.due = now + found.pause;
  return true;
}

void RestartPolicy::stop() {
  stopped_ = true;
  for (auto& [number, place] : places_) place.due.reset();
}

std::vector<RestartPolicy::Due> RestartPolicy::take_due(Time now) {
  std::vector<Due> taken;
  for (auto& [number, place] : places_) {
    if (!place.due || *place.due > now) continue;
    place.due.reset();
    const bool given_up = place.starts >= kStartsWithoutStep;
    if (!given_up) ++place.starts;
    taken.push_back({number, given_up});
  }
  return taken;
}

std::optional<RestartPolicy::Time> RestartPolicy::next() const {
  std::optional<Time> first;
  for (const auto& [number, place] : places_) {
    if (place.due && (!first || *place.due < *first)) first = place.due;
  }
  return first;
}

std::chrono::milliseconds RestartPolicy::pause_of(int place) const {
  const auto found = places_.find(place);
  return found == places_.end() ? std::chrono::milliseconds(0) : found->second.pause;
}

}  // namespace lockstep

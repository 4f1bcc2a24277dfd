#include "lockstep/run/roster_news.h"

#include <algorithm>
#include <map>
#include <string_view>

namespace lockstep {
namespace {

std::vector<std::uint32_t> lanes_of(const LeafOwners& owners, int rank) {
  std::vector<std::uint32_t> lanes;
  for (std::size_t lane = 0; lane < owners.size(); ++lane) {
    if (owners[lane] == rank) lanes.push_back(static_cast<std::uint32_t>(lane));
  }
  return lanes;
}

RunEvent::Kind kind_of(Job::Departure::Kind how) {
  switch (how) {
    case Job::Departure::Kind::kExpelled: return RunEvent::Kind::kExpelled;
    case Job::Departure::Kind::kLeft: return RunEvent::Kind::kLeft;
    default: return RunEvent::Kind::kLost;
  }
}

}  // namespace

void RosterNews::note(const std::vector<Job::Departure>& gone, std::uint32_t generation,
                      const LeafOwners& owners, const std::vector<std::string>& came) {
  for (const Job::Departure& departure : gone) {
    gone_.push_back({departure, generation, lanes_of(owners, departure.rank)});
  }
  // Whose generation ended at once comes again, and may have another rank: what stands behind the
  // rank, "(node7, pid 4711)", is its process.
  const auto process_of = [](std::string_view name) {
    return name.substr(std::min(name.find('('), name.size()));
  };
  for (const std::string& name : came) {
    std::erase_if(
        came_, [&](const std::string& before) { return process_of(before) == process_of(name); });
    came_.push_back(name);
  }
}

void RosterNews::count_failures(std::int64_t step, KillingLanes& killing) const {
  for (const auto& [departure, generation, lanes] : gone_) {
    if (departure.kind != Job::Departure::Kind::kFailed || lanes.empty()) continue;
    killing.lost(step, generation, lanes, departure.why);
  }
}

std::vector<RunEvent> RosterNews::take_events(const GoesOn& now) {
  std::map<RunEvent::Kind, RunEvent> events;
  const auto event_of = [&](RunEvent::Kind kind) -> RunEvent& {
    RunEvent& event = events[kind];
    event.kind = kind;
    event.step = std::min(now.step + 1, now.steps);
    event.lanes = now.lanes;
    event.members = now.members;
    event.seconds = now.seconds;
    return event;
  };
  for (const auto& [gone, generation, its_lanes] : gone_) {
    RunEvent& event = event_of(kind_of(gone.kind));
    event.who.push_back(gone.name);
    if (event.how.empty()) event.how = gone.why;
    // Not if the step under way was done all the same: by another worker, or from sums.
    event.again =
        now.after_loss && !now.went_back && now.step == now.lost_at && now.step < now.steps;
  }
  if (!came_.empty()) event_of(RunEvent::Kind::kJoined).who = came_;
  if (now.went_back) {
    RunEvent& event = event_of(RunEvent::Kind::kWentBack);
    event.step = std::max(event.step, now.lost_at + 1);
    event.back_to = now.step;
  }
  gone_.clear();
  came_.clear();
  std::vector<RunEvent> told;
  for (auto& [kind, event] : events) told.push_back(std::move(event));
  return told;
}

}  // namespace lockstep

#include "lockstep/report/run_events.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "lockstep/base/text.h"
#include "lockstep/base/version.h"

namespace lockstep {
namespace {

// "3 workers, 10 to 11 lanes each"
std::string describe_workers(std::span<const std::uint32_t> lanes) {
  if (lanes.empty()) return "nobody";
  std::string text = fmt::format("{} worker{}", lanes.size(), lanes.size() == 1 ? "" : "s");
  const auto [least, most] = std::ranges::minmax(lanes);
  if (lanes.size() == 1) return text + fmt::format(" with all {} lanes", most);
  if (least == most) return text + fmt::format(", {} lane{} each", most, most == 1 ? "" : "s");
  return text + fmt::format(", {} to {} lanes each", least, most);
}

std::string describe_who(const RunEvent& event) {
  const std::string who = event.who.empty() ? "a worker" : list_of(event.who);
  const bool several = event.who.size() > 1;
  switch (event.kind) {
    case RunEvent::Kind::kLost: return "lost " + who;
    case RunEvent::Kind::kExpelled: return who + (several ? " are expelled" : " is expelled");
    case RunEvent::Kind::kJoined: return who + (several ? " have joined" : " has joined");
    case RunEvent::Kind::kLeft: return who + (several ? " have left" : " has left");
    case RunEvent::Kind::kWentBack: break;
  }
  return event.back_to > 0 ? fmt::format("back to the checkpoint of step {}", event.back_to)
                           : "back to the start";
}

// What all of them have.
Json event_line(std::string_view kind, std::int64_t step) {
  const std::chrono::duration<double> time = std::chrono::system_clock::now().time_since_epoch();
  return {{"event", kind}, {"step", step}, {"time", std::round(time.count() * 1000) / 1000}};
}

}  // namespace

std::string_view to_string(RunEvent::Kind kind) {
  switch (kind) {
    case RunEvent::Kind::kLost: return "lost";
    case RunEvent::Kind::kExpelled: return "expelled";
    case RunEvent::Kind::kJoined: return "joined";
    case RunEvent::Kind::kLeft: return "left";
    case RunEvent::Kind::kWentBack: return "went back";
  }
  return "?";
}

std::string describe(const RunEvent& event) {
  std::string text = fmt::format("step {}: {}", event.step, describe_who(event));
  if (!event.how.empty()) text += fmt::format(": {}", event.how);
  if (event.kind == RunEvent::Kind::kWentBack && event.back_to < event.step) {
    text += fmt::format("; steps {} to {} are computed again", event.back_to + 1, event.step);
  } else if (event.again) {
    text += "; the step is computed again";
  }
  const bool computed = event.again || event.kind == RunEvent::Kind::kWentBack;
  return text + fmt::format("{} {}; went on after {:.1f} s", computed ? " by" : ";",
                            describe_workers(event.lanes), event.seconds);
}

std::string metrics_line(const RunEvent& event) {
  Json line = event_line(to_string(event.kind), event.step);
  if (!event.who.empty()) line["who"] = event.who;
  if (!event.how.empty()) line["how"] = event.how;
  if (event.kind == RunEvent::Kind::kWentBack) line["back_to"] = event.back_to;
  line["again"] = event.again;
  line["workers"] = event.lanes.size();
  line["lanes"] = event.lanes;
  line["members"] = event.members;
  line["seconds"] = event.seconds;
  return to_text(line);
}

std::string metrics_line(const RunStart& start) {
  Json line = event_line("started", start.step);
  line["steps"] = start.steps;
  line["workers"] = start.members.size();
  line["lanes"] = start.lanes;
  line["members"] = start.members;
  line["version"] = version();
  line["settings"] = start.settings;
  line["machine"] = start.machine;
  return to_text(line);
}

std::string saved_line(std::int64_t step, const std::string& name, const std::string& hash) {
  Json line = event_line("saved", step);
  line["name"] = name;
  line["hash"] = hash;
  return to_text(line);
}

std::string halted_line(std::int64_t step, const std::string& why) {
  Json line = event_line("halted", step);
  line["how"] = why;
  return to_text(line);
}

std::string metrics_line(const RunFinish& end) {
  Json line = event_line("ended", end.step);
  line["how"] = end.how;
  line["hash"] = end.hash;
  line["seconds"] = end.seconds;
  return to_text(line);
}

std::vector<std::string> RunEvents::summary(std::size_t most) const {
  if (lines_.empty()) return {};
  std::vector<std::string> text;
  const std::size_t shown = std::min(most, lines_.size());
  text.push_back(
      lines_.size() == 1
          ? "1 event while training:"
          : fmt::format("{} events while training{}:", lines_.size(),
                        shown < lines_.size() ? fmt::format(", the last {} of them", shown) : ""));
  for (std::size_t i = lines_.size() - shown; i < lines_.size(); ++i) {
    text.push_back("  " + lines_[i]);
  }
  return text;
}

}  // namespace lockstep

#include "lockstep/flight/flight_story.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

namespace lockstep {
namespace {

using CallKey = std::tuple<std::uint32_t, std::uint32_t, std::uint64_t>;  // generation, group, n-th

CallKey key_of(const FlightFile::Collective& call) {
  return {call.generation, call.group, call.sequence};
}

// Who came how late: a rank that is the last one in more than this share of the collectives, by at
// least this on average, is named.
constexpr double kOftenLast = 0.5;
constexpr std::int64_t kNoticeable = 1'000'000;
constexpr std::size_t kEnoughCollectives = 10;

std::string ranks_text(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
  const std::vector<int> but_last(ranks.begin(), ranks.end() - 1);
  return fmt::format("ranks {} and {}", fmt::join(but_last, ", "), ranks.back());
}

// The last thing of its kind in the file's own generation.
const FlightFile::Collective* last_collective(const FlightFile& file) {
  const auto found =
      std::find_if(file.collectives.rbegin(), file.collectives.rend(),
                   [&](const auto& each) { return each.generation == file.generation; });
  return found == file.collectives.rend() ? nullptr : &*found;
}

// The collective in which the rank stood: one that has not ended or has failed.
const FlightFile::Collective* open_collective(const FlightFile& file) {
  for (auto each = file.collectives.rbegin(); each != file.collectives.rend(); ++each) {
    if (each->generation != file.generation) break;
    if (each->open()) return &*each;
  }
  return nullptr;
}

// The innermost phase under way, or that a failure ended; if there is none, the one that ended
// last.
const FlightSnapshot::Phase* last_phase(const FlightFile& file) {
  const FlightSnapshot::Phase* ended = nullptr;
  for (auto each = file.phases.rbegin(); each != file.phases.rend(); ++each) {
    if (each->generation != file.generation) break;
    if (each->end == 0 || each->failed) return &*each;
    if (ended == nullptr || each->end > ended->end) ended = &*each;
  }
  return ended;
}

std::string phase_text(const FlightSnapshot::Phase& phase) {
  const std::string lane = phase.lane >= 0 ? fmt::format(" of lane {}", phase.lane) : "";
  return fmt::format("{}{}, step {}", phase.name, lane, phase.step);
}

std::string call_text(const FlightFile::Collective& call) {
  const std::string group = call.group == 0 ? "" : fmt::format(" of group {:08x}", call.group);
  return fmt::format("collective {}{} ({})", call.sequence, group, call.call);
}

// Where a rank was: one sentence, or two.
std::string standing_of(const FlightFile& file) {
  const FlightFile::Collective* open = open_collective(file);
  const FlightFile::Collective* last = last_collective(file);
  const FlightSnapshot::Phase* phase = last_phase(file);
  const std::string who = fmt::format("{} ({}, pid {})", file.name(), file.host, file.pid);
  std::string text;
  if (open != nullptr) {
    const std::int64_t until = open->end == 0 ? file.taken : open->end;
    text = fmt::format("{} {} {} for {}", who, open->failed ? "failed in" : "was in",
                       call_text(*open), short_time(until - open->begin));
    text += open->waited_for >= 0 ? fmt::format(", waiting for rank {}", open->waited_for)
                                  : ", waiting for nobody for long";
    if (phase != nullptr) text += fmt::format("; phase: {}", phase_text(*phase));
    return text + ".";
  }
  if (phase != nullptr && phase->end == 0) {
    text = fmt::format("{} was in {}, for {}", who, phase_text(*phase),
                       short_time(file.taken - phase->begin));
  } else if (phase != nullptr && phase->failed) {
    text = fmt::format("{} was in {}, for {}, when it {}", who, phase_text(*phase),
                       short_time(phase->end - phase->begin),
                       file.last_words.empty() ? "learnt of the failure" : "failed");
  } else if (phase != nullptr) {
    text = fmt::format("{} was between two phases; the last was {}, {} before", who,
                       phase_text(*phase), short_time(file.taken - phase->end));
  } else {
    text = fmt::format("{} had not begun a phase", who);
  }
  text += last == nullptr ? "; it was in no collective before."
                          : fmt::format("; the last collective that it finished is {}, {} before.",
                                        call_text(*last), short_time(file.taken - last->end));
  return text;
}

// What the ranks called alike, or not.
std::optional<std::string> mismatch(const std::vector<FlightFile>& files) {
  std::map<CallKey, std::pair<int, std::string>> first;
  for (const FlightFile& file : files) {
    for (const FlightFile::Collective& each : file.collectives) {
      const auto [found, added] = first.try_emplace(key_of(each), file.rank, each.call);
      if (added || found->second.second == each.call) continue;
      return fmt::format(
          "The ranks did not make the same calls: as collective {} rank {} called "
          "{}, rank {} called {}.",
          each.sequence, found->second.first, found->second.second, file.rank, each.call);
    }
  }
  return std::nullopt;
}

// How often each rank was the last to enter a collective, and how long after the first.
struct Lateness {
  std::size_t collectives = 0;  // of steps, that all ranks have recorded
  std::map<int, std::size_t> last;
  std::map<int, std::int64_t> late;  // nanoseconds in all
};

Lateness lateness_of(const std::vector<FlightFile>& files) {
  std::map<CallKey, std::vector<std::pair<std::int64_t, int>>> entered;
  for (const FlightFile& file : files) {
    for (const FlightFile::Collective& each : file.collectives) {
      if (each.generation == file.generation && each.step > 0) {
        entered[key_of(each)].emplace_back(each.begin, file.rank);
      }
    }
  }
  Lateness lateness;
  for (const auto& [key, times] : entered) {
    if (times.size() < files.size()) continue;
    const auto [earliest, latest] = std::ranges::minmax(times);
    ++lateness.collectives;
    ++lateness.last[latest.second];
    lateness.late[latest.second] += latest.first - earliest.first;
  }
  return lateness;
}

// Who is to be looked at, given where all ranks stood.
class Chase {
 public:
  explicit Chase(const std::vector<FlightFile>& files) : files_(files) {
    for (const FlightFile& file : files) by_rank_.emplace(file.rank, &file);
    world_size_ = files.front().world_size;
    follow();
  }

  const std::vector<int>& culprits() const { return culprits_; }
  std::vector<std::string> sentences() const {
    std::vector<std::string> texts;
    for (const auto& [target, waiting] : waited_by_) {
      texts.push_back(fmt::format("{} waited for rank {}{}", capital(ranks_text(waiting)), target,
                                  why_it_did_not_come(target)));
    }
    return texts;
  }

 private:
  static std::string capital(std::string text) {
    text[0] = 'R';
    return text;
  }

  static bool failed_by_itself(const FlightFile& file) {
    return !file.last_words.empty() || !file.ended.empty();
  }

  const FlightFile* find(int rank) const {
    const auto found = by_rank_.find(rank);
    return found == by_rank_.end() ? nullptr : found->second;
  }

  // The rank that held `file` up in `open`: one that had not entered the collective, first of all
  // one that never could, or the one that it says it waited for.
  std::optional<int> holder(const FlightFile& file, const FlightFile::Collective& open) const {
    const auto has_entered = [&](const FlightFile& other) {
      return std::ranges::any_of(other.collectives, [&](const auto& each) {
        return each.generation == open.generation && each.group == open.group &&
               each.sequence >= open.sequence;
      });
    };
    if (open.waited_for >= 0) {
      const FlightFile* awaited = find(open.waited_for);
      if (awaited == nullptr || !has_entered(*awaited)) return open.waited_for;
    }
    if (open.group == 0) {  // all ranks are in it
      std::optional<int> late;
      for (const FlightFile& other : files_) {
        if (other.rank == file.rank || other.rank < 0 || has_entered(other)) continue;
        if (failed_by_itself(other)) return other.rank;
        if (!late) late = other.rank;
      }
      if (late) return late;
    }
    if (open.waited_for >= 0) return open.waited_for;
    return std::nullopt;
  }

  void follow() {
    std::map<int, int> next;
    for (const FlightFile& file : files_) {
      const FlightFile::Collective* open = open_collective(file);
      if (open == nullptr || failed_by_itself(file)) continue;
      if (const auto target = holder(file, *open); target && *target != file.rank) {
        next[file.rank] = *target;
        waited_by_[*target].push_back(file.rank);
      }
    }
    std::set<int> ends;
    for (const auto& [start, target] : next) {
      std::set<int> seen;
      int rank = start;
      while (next.contains(rank) && seen.insert(rank).second) rank = next.at(rank);
      if (!next.contains(rank)) ends.insert(rank);
    }
    for (const FlightFile& file : files_) {
      if (failed_by_itself(file)) ends.insert(file.rank);
    }
    if (waited_by_.empty() && ends.empty()) {
      for (int rank = 0; rank < world_size_; ++rank) {
        if (find(rank) == nullptr) ends.insert(rank);
      }
    }
    culprits_.assign(ends.begin(), ends.end());
  }

  std::string why_it_did_not_come(int rank) const {
    const FlightFile* file = find(rank);
    if (file == nullptr)
      return ", which left no file: it died without one, or its file is elsewhere.";
    if (!file->ended.empty()) return fmt::format(", which {}.", file->ended);
    if (!file->last_words.empty()) return ", which failed by itself.";
    if (const auto* open = open_collective(*file)) {
      if (open->waited_for >= 0)
        return fmt::format(", which waited for rank {}.", open->waited_for);
      return fmt::format(", which was in {} itself.", call_text(*open));
    }
    const FlightSnapshot::Phase* phase = last_phase(*file);
    if (phase != nullptr) return fmt::format(", which was in {}.", phase_text(*phase));
    return ", which was in no collective.";
  }

  const std::vector<FlightFile>& files_;
  std::map<int, const FlightFile*> by_rank_;
  int world_size_ = 0;
  std::map<int, std::vector<int>> waited_by_;
  std::vector<int> culprits_;
};

std::string lateness_text(const std::vector<FlightFile>& files) {
  if (files.size() < 2) return "";
  const Lateness lateness = lateness_of(files);
  if (lateness.collectives < kEnoughCollectives) return "";
  for (const auto& [rank, times] : lateness.last) {
    const auto count = static_cast<std::int64_t>(times);
    const std::int64_t mean = lateness.late.at(rank) / count;
    if (static_cast<double>(times) < kOftenLast * static_cast<double>(lateness.collectives) ||
        mean < kNoticeable) {
      continue;
    }
    return fmt::format(
        "Of the last {} collectives of steps rank {} entered {} as the last one, "
        "{} after the first on average: it is slower than the others.",
        lateness.collectives, rank, times, short_time(mean));
  }
  return fmt::format("Of the last {} collectives of steps no rank was late regularly.",
                     lateness.collectives);
}

}  // namespace

std::string short_time(std::int64_t nanoseconds) {
  const auto value = static_cast<double>(nanoseconds);
  if (value >= 9.995e8) return fmt::format("{:.1f} s", value / 1e9);
  if (value >= 9.995e5) return fmt::format("{:.0f} ms", value / 1e6);
  return fmt::format("{:.0f} us", value / 1e3);
}

std::int64_t align_clocks(std::vector<FlightFile>& files) {
  const auto move = [](FlightFile& file, std::int64_t by) {
    file.taken += by;
    file.unix_offset -= by;
    for (auto& each : file.phases) {
      each.begin += by;
      if (each.end != 0) each.end += by;
    }
    for (auto& each : file.collectives) {
      each.begin += by;
      if (each.end != 0) each.end += by;
    }
  };
  const auto elsewhere = [&](const FlightFile& file) {
    return file.boot_id != files.front().boot_id;
  };
  if (std::ranges::none_of(files, elsewhere)) return 0;
  for (FlightFile& file : files) move(file, file.unix_offset);
  // By host, against the first one.
  std::map<CallKey, std::int64_t> ends;
  for (const FlightFile& file : files) {
    if (elsewhere(file)) continue;
    for (const auto& each : file.collectives) {
      if (!each.open()) ends.try_emplace(key_of(each), each.end);
    }
  }
  std::map<std::string, std::vector<std::int64_t>> differences;
  for (const FlightFile& file : files) {
    if (!elsewhere(file)) continue;
    for (const auto& each : file.collectives) {
      const auto found = ends.find(key_of(each));
      if (!each.open() && found != ends.end()) {
        differences[file.boot_id].push_back(each.end - found->second);
      }
    }
  }
  std::int64_t largest = 0;
  for (auto& [boot_id, list] : differences) {
    const auto middle = list.begin() + static_cast<std::ptrdiff_t>(list.size() / 2);
    std::ranges::nth_element(list, middle);
    largest = std::max(largest, std::abs(*middle));
    for (FlightFile& file : files) {
      if (file.boot_id == boot_id) move(file, -*middle);
    }
  }
  return largest;
}

FlightStory tell_flight(const std::vector<FlightFile>& files) {
  FlightStory story;
  const FlightFile& newest = *std::ranges::max_element(files, {}, &FlightFile::written_at);
  const std::chrono::sys_seconds when{std::chrono::seconds(newest.written_at() / 1'000'000'000)};
  story.sentences.push_back(fmt::format(
      "Generation {} had {} rank{}; {} of them left a file, the last at {:%Y-%m-%d %H:%M:%S} UTC.",
      newest.generation, newest.world_size, newest.world_size == 1 ? "" : "s", files.size(), when));
  std::map<std::string, std::vector<int>> reasons;
  for (const FlightFile& file : files) {
    if (!file.why.empty()) reasons[file.why].push_back(file.rank);
  }
  for (const auto& [why, ranks] : reasons) {
    story.sentences.push_back(fmt::format("Why {} wrote: {}", ranks_text(ranks), why));
  }
  for (const FlightFile& file : files) {
    story.sentences.push_back(standing_of(file));
    if (!file.ended.empty()) {
      story.sentences.push_back(fmt::format("{} {}.", file.name(), file.ended));
    }
    if (!file.last_words.empty()) {
      story.sentences.push_back(
          fmt::format("The last words of {}: {}", file.name(), file.last_words));
    }
  }
  for (int rank = 0; rank < newest.world_size; ++rank) {
    if (std::ranges::find(files, rank, &FlightFile::rank) == files.end()) {
      story.sentences.push_back(
          fmt::format("rank {} left no file: it was killed where no launcher of ours could write "
                      "for it, or its "
                      "file is in a folder of another host.",
                      rank));
    }
  }
  if (const auto text = mismatch(files)) story.sentences.push_back(*text);
  const Chase chase(files);
  for (std::string& text : chase.sentences()) story.sentences.push_back(std::move(text));
  story.held_up_by = chase.culprits();
  if (const std::string text = lateness_text(files); !text.empty()) {
    story.sentences.push_back(text);
  }
  if (story.held_up_by.empty()) {
    story.sentences.emplace_back("No rank stands out as the one that held up the others.");
  } else {
    story.sentences.push_back(fmt::format("Look at {} first.", ranks_text(story.held_up_by)));
  }
  return story;
}

}  // namespace lockstep

#include "lockstep/net/job/job_health.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

// Who has answered before it entered a collective is asked again after so long.
constexpr milliseconds kAskAgain{20};
constexpr milliseconds kAskAfterGoodbye{100};

// Reports that say "I lost that rank", which may be the echo of another failure.
bool is_accusation(ErrorCode code) {
  return code == ErrorCode::kPeerLost || code == ErrorCode::kChannelClosed ||
         code == ErrorCode::kNoConnection || code == ErrorCode::kIo || code == ErrorCode::kTimeout;
}

bool is_inside(const std::vector<Progress>& progress) {
  return std::ranges::any_of(progress, [](const Progress& entry) { return entry.inside; });
}

std::string describe(const Progress& progress) {
  return fmt::format("collective {} ({})", progress.sequence, progress.description);
}

}  // namespace

Error aborted_error(const std::string& name, int rank, std::string_view reason) {
  return Error(ErrorCode::kAborted, fmt::format("{} aborted: {}", name, reason), rank);
}

std::string without_name(std::string_view why, std::string_view name) {
  if (why.starts_with(name)) {
    const std::string_view rest = why.substr(name.size());
    if (rest.starts_with(": ")) return std::string(rest.substr(2));
    if (rest.starts_with(" ")) return std::string(rest.substr(1));
  }
  return std::string(why);
}

JobHealth::JobHealth(std::vector<std::string> names, Clock::duration timeout, Time now)
    : timeout_(timeout), last_tick_(now) {
  for (std::string& name : names) {
    heard_.emplace(now, static_cast<int>(ranks_.size()));
    ranks_.push_back({.name = std::move(name), .last_heard = now, .progress = {}, .suspicion = {}});
  }
}

void JobHealth::decide(ErrorCode code, std::string message, int rank) {
  if (!verdict_) verdict_ = Error(code, std::move(message), rank);
}

void JobHealth::hear(int rank, std::vector<Progress> progress, Time now) {
  erase(rank);
  ranks_[rank].progress = std::move(progress);
  enter(rank);
  set_last_heard(rank, now);
  check_mismatch(rank, now);
}

void JobHealth::set_last_heard(int rank, Time time) {
  RankState& state = ranks_[rank];
  if (heard_.erase({state.last_heard, rank}) > 0) heard_.emplace(time, rank);
  state.last_heard = time;
}

void JobHealth::enter(int rank) {
  const RankState& state = ranks_[rank];
  for (const Progress& at : state.progress) {
    if (at.sequence > 0) ++calls_[{at.sequence, at.group}][at.description];
    if (at.inside && !state.departed) waits_[at.group].emplace(at.sequence, rank);
  }
}

void JobHealth::erase(int rank) {
  for (const Progress& at : ranks_[rank].progress) {
    if (const auto call = calls_.find({at.sequence, at.group}); call != calls_.end()) {
      const auto described = call->second.find(at.description);
      if (described != call->second.end() && --described->second == 0) {
        call->second.erase(described);
        if (call->second.empty()) calls_.erase(call);
      }
    }
    if (const auto waits = waits_.find(at.group); waits != waits_.end()) {
      waits->second.erase({at.sequence, rank});
      if (waits->second.empty()) waits_.erase(waits);
    }
  }
}

void JobHealth::depart(int rank) {
  RankState& state = ranks_[rank];
  if (state.departed) return;
  erase(rank);
  state.departed = true;
  enter(rank);
  heard_.erase({state.last_heard, rank});
  std::set<std::uint32_t> groups;  // of each the first entry is the newest
  for (const Progress& at : state.progress) {
    if (!groups.insert(at.group).second) continue;
    const auto [entry, added] = departed_.try_emplace(at.group, LastEntered{at.sequence, rank});
    if (!added && at.sequence < entry->second.sequence) entry->second = {at.sequence, rank};
  }
}

void JobHealth::heartbeat(int rank, std::vector<Progress> progress, Time now) {
  hear(rank, std::move(progress), now);
  for (const Progress& at : ranks_[rank].progress) {
    check_waits(at.group);
    check_wait(rank, at);
  }
}

void JobHealth::goodbye(int rank, std::vector<Progress> progress, Time now) {
  hear(rank, std::move(progress), now);
  depart(rank);
  for (const Progress& at : ranks_[rank].progress) check_waits(at.group);
  if (!ask_at_ && !heard_.empty()) ask_at_ = now + kAskAfterGoodbye;
}

void JobHealth::closed(int rank, Time) {
  const RankState& state = ranks_[rank];
  if (state.departed) return;
  depart(rank);
  if (state.suspicion) return;  // it told us why it would go
  decide(ErrorCode::kPeerLost, fmt::format("{} died: its connection closed", state.name), rank);
}

void JobHealth::report(int rank, const Report& report, Time now) {
  hear(rank, report.progress, now);
  const Error& error = report.error;
  if (error.code() == ErrorCode::kAborted) {
    if (!verdict_) verdict_ = aborted_error(ranks_[rank].name, rank, error.message());
    return;
  }
  if (error.code() == ErrorCode::kTimeout && is_inside(report.progress)) {
    if (!overdue_) overdue_ = Overdue{rank, error};
    ask_around(now);
    return;
  }
  if (error.code() == ErrorCode::kCollectiveMismatch) {
    // All will tell what they called; the reporter saw but two of them.
    const int fault = valid(error.rank()) ? error.rank() : rank;
    if (!mismatch_) mismatch_ = Error(error.code(), seen_by(rank, error), fault);
    ask_around(now);
    return;
  }
  if (is_accusation(error.code()) && valid(error.rank()) && error.rank() != rank) {
    suspect(rank, error, now);
    return;
  }
  decide(error.code(), seen_by(rank, error), valid(error.rank()) ? error.rank() : rank);
}

void JobHealth::cannot_enter(int rank, const Error& error, Time now) {
  set_last_heard(rank, now);
  if (valid(error.rank()) && error.rank() != rank) {
    ranks_[rank].enters = true;
    suspect(rank, error, now);
  } else {
    decide(ErrorCode::kPeerLost, seen_by(rank, error), rank);
  }
}

void JobHealth::centre_report(const std::string& name, const Error& error, Time now) {
  if (error.code() == ErrorCode::kAborted) {
    if (!verdict_) verdict_ = aborted_error(name, -1, error.message());
  } else if (error.code() == ErrorCode::kCollectiveMismatch) {
    if (!mismatch_) mismatch_ = error;
    ask_around(now);
  } else {
    decide(error.code(), std::string(error.message()), error.rank());
  }
}

void JobHealth::suspect(int reporter, const Error& error, Time now) {
  if (ranks_[reporter].suspicion) return;
  ranks_[reporter].suspicion = error;
  accusers_.push_back(reporter);
  if (accusers_.size() == 1) {
    grace_ends_ = now + std::min<Clock::duration>(timeout_ / 10, milliseconds(300));
  }
  // Nothing better will come from an accused that left without a complaint of its own.
  const RankState& accused = ranks_[error.rank()];
  if (accused.departed && !accused.suspicion) resolve_suspicion();
}

// Follows the accusations from the first to a rank that accuses nobody: there it began.
void JobHealth::resolve_suspicion() {
  int reporter = accusers_.front();
  std::vector<bool> visited(ranks_.size());
  while (true) {
    visited[reporter] = true;
    const int accused = ranks_[reporter].suspicion->rank();
    if (!ranks_[accused].suspicion || visited[accused]) break;
    reporter = accused;
  }
  const int accused = ranks_[reporter].suspicion->rank();
  if (ranks_[accused].suspicion) reporter = accusers_.front();  // a circle: the first word counts
  const Error& error = *ranks_[reporter].suspicion;
  const int rank = error.rank();
  if (ranks_[reporter].enters && !ranks_[rank].departed) {
    decide(ErrorCode::kPeerLost, fmt::format("{}: {}", ranks_[reporter].name, error.message()),
           reporter);
  } else if (ranks_[rank].departed) {
    decide(ErrorCode::kPeerLost, fmt::format("{} has left the job", ranks_[rank].name), rank);
  } else if (error.code() == ErrorCode::kTimeout) {
    decide(ErrorCode::kTimeout, seen_by(reporter, error), rank);  // alive, but it did not come
  } else {
    decide(ErrorCode::kPeerLost,
           fmt::format("{} is out of reach: {} (seen by {})", ranks_[rank].name,
                       without_name(error.message(), ranks_[rank].name), ranks_[reporter].name),
           rank);
  }
}

void JobHealth::ask_around(Time now) {
  if (question_) return;
  question_ = Question{now, now + std::min<Clock::duration>(timeout_ / 5, milliseconds(500))};
  ping_ = true;
}

bool JobHealth::all_answered() const {
  return heard_.empty() || heard_.begin()->first > question_->asked;
}

bool JobHealth::may_learn_more() const {
  const auto parted =
      std::ranges::find_if(calls_, [](const auto& call) { return call.second.size() > 1; });
  if (!mismatch_ || parted == calls_.end()) return false;
  std::size_t told = 0;
  for (const auto& [description, ranks] : parted->second) told += static_cast<std::size_t>(ranks);
  return told < heard_.size();
}

void JobHealth::check_mismatch(int rank, Time now) {
  if (mismatch_) return;
  for (const Progress& own : ranks_[rank].progress) {
    if (const auto error = find_mismatch(own.group, own.sequence)) {
      // The rest of the ranks will tell who is the odd one out.
      mismatch_ = error;
      ask_around(now);
      return;
    }
  }
}

std::optional<Error> JobHealth::find_mismatch(std::uint32_t group, std::uint64_t sequence) const {
  const auto call = calls_.find({sequence, group});
  if (call == calls_.end() || call->second.size() < 2) return std::nullopt;
  std::map<std::string_view, std::vector<int>> callers;
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
    if (const Progress* entry = find_progress(rank, group, sequence)) {
      callers[entry->description].push_back(rank);
    }
  }
  if (callers.size() < 2) return std::nullopt;
  // The fewest are to blame; between equals, the higher ranks.
  const auto weight = [](const auto& entry) {
    return std::pair(entry.second.size(), -entry.second.front());
  };
  const auto [few, many] = std::ranges::minmax_element(callers, {}, weight);
  const int fault = few->second.front();
  return Error(ErrorCode::kCollectiveMismatch,
               fmt::format("{} called {}, {} called {}, as collective {}", ranks_[fault].name,
                           few->first, ranks_[many->second.front()].name, many->first, sequence),
               fault);
}

// Where the ranks parted: all that follows is its consequence.
std::optional<Error> JobHealth::first_mismatch() const {
  for (const auto& [place, descriptions] : calls_) {
    if (const auto error = find_mismatch(place.second, place.first)) return error;
  }
  return std::nullopt;
}

// A rank inside a collective that somebody left the job without entering waits in vain.
void JobHealth::check_waits(std::uint32_t group) {
  const auto gone = departed_.find(group);
  const auto waits = waits_.find(group);
  if (gone == departed_.end() || waits == waits_.end()) return;
  const auto& [sequence, waiting] = *waits->second.rbegin();
  if (gone->second.sequence >= sequence) return;
  decide(ErrorCode::kPeerLost,
         fmt::format("{} has left the job after collective {}; {} waits for it in {}",
                     ranks_[gone->second.rank].name, gone->second.sequence, ranks_[waiting].name,
                     describe(*find_progress(waiting, group, sequence))),
         gone->second.rank);
}

// Of a leaver that never entered the group there is no collective to compare with.
void JobHealth::check_wait(int rank, const Progress& at) {
  const int other = at.waits_for;
  if (!at.inside || !valid(other) || other == rank || !ranks_[other].departed) return;
  if (find_progress(other, at.group) != nullptr) return;
  decide(ErrorCode::kPeerLost,
         fmt::format("{} has left the job; {} waits for it in {}", ranks_[other].name,
                     ranks_[rank].name, describe(at)),
         other);
}

void JobHealth::resolve_question() {
  question_.reset();
  if (mismatch_) {
    verdict_ = first_mismatch().value_or(*mismatch_);
    return;
  }
  const auto& [reporter, error] = *overdue_;
  for (const Progress& at : ranks_[reporter].progress) {
    if (at.inside && (name_absent(reporter, at, error) || name_idle(reporter, at, error))) return;
  }
  decide(ErrorCode::kTimeout, seen_by(reporter, error),
         valid(error.rank()) ? error.rank() : reporter);
}

bool JobHealth::name_absent(int reporter, const Progress& at, const Error& error) {
  std::vector<int> absent;
  std::uint64_t lowest = at.sequence;
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
    const Progress* seen = find_progress(rank, at.group);
    if (seen == nullptr || seen->sequence > lowest || seen->sequence >= at.sequence) continue;
    if (seen->sequence < lowest) absent.clear();
    lowest = seen->sequence;
    absent.push_back(rank);
  }
  // A rank that the reporter waited for and that never used this group.
  if (absent.empty() && valid(error.rank()) && error.rank() != reporter &&
      find_progress(error.rank(), at.group) == nullptr) {
    absent.push_back(error.rank());
    lowest = 0;
  }
  if (absent.empty()) return false;

  // Of those who are still in the collective before, the ones that wait there for another of them
  // are held up themselves.
  const auto waits_for_another = [&](int rank) {
    const Progress* seen = find_progress(rank, at.group);
    return seen != nullptr && seen->inside && seen->waits_for != rank &&
           std::ranges::find(absent, seen->waits_for) != absent.end();
  };
  std::vector<int> idle;
  std::ranges::remove_copy_if(absent, std::back_inserter(idle), waits_for_another);
  if (!idle.empty()) absent = std::move(idle);

  std::vector<std::string> names;
  for (const int rank : absent) {
    names.push_back(ranks_[rank].name + (ranks_[rank].departed ? ", which has left the job," : ""));
  }
  const Progress* first = find_progress(absent.front(), at.group);
  const char* where = first != nullptr && first->inside ? "in" : "after";
  decide(ErrorCode::kTimeout,
         fmt::format(
             "{} {} not entered {}; last seen {}", list_of(names, ", "),
             absent.size() == 1 ? "has" : "have", describe(at),
             lowest == 0 ? "before the first" : fmt::format("{} collective {}", where, lowest)),
         absent.front());
  return true;
}

// All have come and yet it does not end: follows who waits for whom to one who waits for nobody.
bool JobHealth::name_idle(int reporter, const Progress& at, const Error& error) {
  std::vector<bool> visited(ranks_.size());
  visited[reporter] = true;
  int rank = error.rank();
  while (valid(rank) && !visited[rank]) {
    visited[rank] = true;
    const Progress* seen = find_progress(rank, at.group);
    if (seen == nullptr || !seen->inside || !valid(seen->waits_for)) {
      decide(ErrorCode::kTimeout,
             fmt::format("{} {} {}, and the others wait for it", ranks_[rank].name,
                         seen == nullptr ? "has not entered" : "does not go on in", describe(at)),
             rank);
      return true;
    }
    rank = seen->waits_for;
  }
  return false;
}

const Progress* JobHealth::find_progress(int rank, std::uint32_t group) const {
  const auto& progress = ranks_[rank].progress;
  const auto entry = std::ranges::find(progress, group, &Progress::group);
  return entry == progress.end() ? nullptr : &*entry;
}

const Progress* JobHealth::find_progress(int rank, std::uint32_t group,
                                         std::uint64_t sequence) const {
  const auto& progress = ranks_[rank].progress;
  const auto entry = std::ranges::find_if(
      progress, [&](const Progress& at) { return at.group == group && at.sequence == sequence; });
  return entry == progress.end() ? nullptr : &*entry;
}

std::string JobHealth::seen_by(int reporter, const Error& error) const {
  const std::string& who = ranks_[reporter].name;
  if (!valid(error.rank()) || error.rank() == reporter) {
    return fmt::format("{}: {}", who, error.message());
  }
  const std::string& fault = ranks_[error.rank()].name;
  if (error.message().starts_with(fault)) {  // the reporter has named it
    return fmt::format("{} (seen by {})", error.message(), who);
  }
  return fmt::format("{}: {} (seen by {})", fault, error.message(), who);
}

void JobHealth::tick(Time now) {
  if (now - last_tick_ > timeout_ / 2) {  // it was this process that stood still
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
      set_last_heard(rank, excuse_own_pause(ranks_[rank].last_heard, last_tick_, now, timeout_));
    }
  }
  last_tick_ = now;
  if (verdict_) return;

  if (!accusers_.empty() && now >= grace_ends_) resolve_suspicion();
  if (ask_at_ && now >= *ask_at_) {
    ask_at_.reset();
    ping_ = true;
  }
  if (!verdict_ && question_) {
    const bool answered = all_answered();
    if (now >= question_->until || (answered && !may_learn_more())) {
      resolve_question();
    } else if (answered && now >= question_->asked + kAskAgain) {
      question_->asked = now;
      ping_ = true;
    }
  }
  if (heard_.empty() || now - heard_.begin()->first < timeout_) return;
  const int rank = heard_.begin()->second;
  decide(ErrorCode::kPeerLost,
         fmt::format("{} has been silent for {}: stopped or cut off", ranks_[rank].name,
                     format_duration(timeout_)),
         rank);
}

void JobHealth::settle() {
  if (!verdict_ && question_) resolve_question();
  if (!verdict_ && !accusers_.empty()) resolve_suspicion();
}

JobHealth::Time JobHealth::wake_at() const {
  if (verdict_) return Time::max();
  Time wake = last_tick_ + timeout_ / 5;
  if (!heard_.empty()) wake = std::min(wake, heard_.begin()->first + timeout_);
  if (!accusers_.empty()) wake = std::min(wake, grace_ends_);
  if (ask_at_) wake = std::min(wake, *ask_at_);
  if (question_) {
    wake = std::min(wake, question_->until);
    if (all_answered()) wake = std::min(wake, question_->asked + kAskAgain);
  }
  return wake;
}

bool JobHealth::take_ping() { return std::exchange(ping_, false); }

}  // namespace lockstep

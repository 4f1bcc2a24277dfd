#include "lockstep/net/job_health.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "lockstep/net/text.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

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

JobHealth::JobHealth(std::vector<std::string> names, Clock::duration timeout, Time now)
    : timeout_(timeout), last_tick_(now) {
  for (std::string& name : names) {
    RankState state;
    state.name = std::move(name);
    state.last_heard = now;
    ranks_.push_back(std::move(state));
  }
}

void JobHealth::decide(ErrorCode code, std::string message, int rank) {
  if (!verdict_) verdict_ = Error(code, std::move(message), rank);
}

void JobHealth::hear(int rank, std::vector<Progress> progress, Time now) {
  ranks_[rank].last_heard = now;
  ranks_[rank].progress = std::move(progress);
  check_mismatch(rank);
}

void JobHealth::heartbeat(int rank, std::vector<Progress> progress, Time now) {
  hear(rank, std::move(progress), now);
  check_departed();
}

void JobHealth::goodbye(int rank, std::vector<Progress> progress, Time now) {
  hear(rank, std::move(progress), now);
  ranks_[rank].departed = true;
  check_departed();
}

void JobHealth::closed(int rank, Time) {
  RankState& state = ranks_[rank];
  if (state.departed) return;
  state.departed = true;
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
    if (overdue_) return;
    // Heartbeats may be old; ask where everybody is now before blaming anybody.
    const auto patience = std::min<Clock::duration>(timeout_ / 5, milliseconds(500));
    overdue_ = Overdue{rank, error, now, now + patience};
    ping_ = true;
    return;
  }
  if (is_accusation(error.code()) && valid(error.rank()) && error.rank() != rank) {
    suspect(rank, error, now);
    return;
  }
  decide(error.code(), seen_by(rank, error), valid(error.rank()) ? error.rank() : rank);
}

void JobHealth::suspect(int reporter, const Error& error, Time now) {
  if (ranks_[reporter].suspicion) return;
  ranks_[reporter].suspicion = error;
  accusers_.push_back(reporter);
  if (accusers_.size() == 1) {
    grace_ends_ = now + std::min<Clock::duration>(timeout_ / 10, milliseconds(300));
  }
  // Nothing better will come: the accused has said its last word.
  if (ranks_[error.rank()].departed) resolve_suspicion();
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
  if (ranks_[rank].departed) {
    decide(ErrorCode::kPeerLost, fmt::format("{} has left the job", ranks_[rank].name), rank);
  } else {
    decide(ErrorCode::kPeerLost,
           fmt::format("{} is out of reach: {} (seen by {})", ranks_[rank].name, error.message(),
                       ranks_[reporter].name),
           rank);
  }
}

void JobHealth::check_mismatch(int rank) {
  for (const Progress& own : ranks_[rank].progress) {
    if (own.sequence == 0) continue;
    const auto same_place = [&](const Progress& entry) {
      return entry.channel == own.channel && entry.sequence == own.sequence;
    };
    int other = -1;
    int agree = 0;
    int differ = 0;
    const Progress* theirs = nullptr;
    for (int peer = 0; peer < static_cast<int>(ranks_.size()); ++peer) {
      const auto entry = std::ranges::find_if(ranks_[peer].progress, same_place);
      if (entry == ranks_[peer].progress.end()) continue;
      if (entry->description == own.description) {
        ++agree;
      } else if (++differ; other < 0) {
        other = peer;
        theirs = &*entry;
      }
    }
    if (other < 0) continue;
    // The odd one out is to blame; between equals, the higher rank.
    const bool own_fault = agree < differ || (agree == differ && rank > other);
    const int fault = own_fault ? rank : other;
    const int right = own_fault ? other : rank;
    decide(ErrorCode::kCollectiveMismatch,
           fmt::format("{} called {}, {} called {}, as collective {}", ranks_[fault].name,
                       own_fault ? own.description : theirs->description, ranks_[right].name,
                       own_fault ? theirs->description : own.description, own.sequence),
           fault);
    return;
  }
}

// A rank inside a collective that somebody left the job without entering waits in vain.
void JobHealth::check_departed() {
  for (int gone = 0; gone < static_cast<int>(ranks_.size()); ++gone) {
    if (!ranks_[gone].departed) continue;
    for (const RankState& waiting : ranks_) {
      for (const Progress& at : waiting.progress) {
        const Progress* last = find_progress(gone, at.channel);
        if (waiting.departed || !at.inside || last == nullptr || last->sequence >= at.sequence) {
          continue;
        }
        decide(ErrorCode::kPeerLost,
               fmt::format("{} has left the job after collective {}; {} waits for it in {}",
                           ranks_[gone].name, last->sequence, waiting.name, describe(at)),
               gone);
        return;
      }
    }
  }
}

void JobHealth::resolve_overdue() {
  const Overdue overdue = *std::exchange(overdue_, std::nullopt);
  for (const Progress& at : ranks_[overdue.reporter].progress) {
    if (at.inside && name_absent(overdue.reporter, at, overdue.error)) return;
  }
  decide(ErrorCode::kTimeout, seen_by(overdue.reporter, overdue.error),
         valid(overdue.error.rank()) ? overdue.error.rank() : overdue.reporter);
}

bool JobHealth::name_absent(int reporter, const Progress& at, const Error& error) {
  std::vector<int> absent;
  std::uint64_t lowest = at.sequence;
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
    const Progress* seen = find_progress(rank, at.channel);
    if (seen == nullptr || seen->sequence > lowest || seen->sequence >= at.sequence) continue;
    if (seen->sequence < lowest) absent.clear();
    lowest = seen->sequence;
    absent.push_back(rank);
  }
  // A rank that the reporter waited for and that never used this channel.
  if (absent.empty() && valid(error.rank()) && error.rank() != reporter &&
      find_progress(error.rank(), at.channel) == nullptr) {
    absent.push_back(error.rank());
    lowest = 0;
  }
  if (absent.empty()) return false;

  std::vector<std::string> names;
  for (const int rank : absent) {
    names.push_back(ranks_[rank].name + (ranks_[rank].departed ? ", which has left the job," : ""));
  }
  decide(ErrorCode::kTimeout,
         fmt::format("{} {} not entered {}; last seen {}", list_of(names, ", "),
                     absent.size() == 1 ? "has" : "have", describe(at),
                     lowest == 0 ? "before the first" : fmt::format("after collective {}", lowest)),
         absent.front());
  return true;
}

const Progress* JobHealth::find_progress(int rank, std::uint32_t channel) const {
  const auto& progress = ranks_[rank].progress;
  const auto entry = std::ranges::find(progress, channel, &Progress::channel);
  return entry == progress.end() ? nullptr : &*entry;
}

std::string JobHealth::seen_by(int reporter, const Error& error) const {
  const std::string& who = ranks_[reporter].name;
  if (!valid(error.rank()) || error.rank() == reporter) {
    return fmt::format("{}: {}", who, error.message());
  }
  return fmt::format("{}: {} (seen by {})", ranks_[error.rank()].name, error.message(), who);
}

void JobHealth::tick(Time now) {
  // If we slept far longer than ever planned, it was us who were stopped: nobody else is to blame.
  const auto slept = now - last_tick_;
  if (slept > timeout_ / 2) {
    for (RankState& state : ranks_) state.last_heard = std::min(now, state.last_heard + slept);
  }
  last_tick_ = now;
  if (verdict_) return;

  if (!accusers_.empty() && now >= grace_ends_) resolve_suspicion();
  if (overdue_) {
    const bool all_answered = std::ranges::all_of(ranks_, [&](const RankState& state) {
      return state.departed || state.last_heard > overdue_->asked ||
             &state == &ranks_[overdue_->reporter];
    });
    if (all_answered || now >= overdue_->until) resolve_overdue();
  }
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
    const RankState& state = ranks_[rank];
    if (state.departed || now - state.last_heard < timeout_) continue;
    decide(ErrorCode::kPeerLost,
           fmt::format("{} has been silent for {}: stopped or cut off", state.name,
                       format_duration(timeout_)),
           rank);
  }
}

void JobHealth::settle() {
  if (!accusers_.empty()) resolve_suspicion();
  if (overdue_) resolve_overdue();
}

JobHealth::Time JobHealth::wake_at() const {
  if (verdict_) return Time::max();
  Time wake = last_tick_ + timeout_ / 5;
  for (const RankState& state : ranks_) {
    if (!state.departed) wake = std::min(wake, state.last_heard + timeout_);
  }
  if (!accusers_.empty()) wake = std::min(wake, grace_ends_);
  if (overdue_) wake = std::min(wake, overdue_->until);
  return wake;
}

bool JobHealth::take_ping() { return std::exchange(ping_, false); }

}  // namespace lockstep

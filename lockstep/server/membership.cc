#include "lockstep/server/membership.h"

#include <fmt/format.h>

#include <algorithm>

#include "lockstep/base/check.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

Membership::Time later(Membership::Time from, Membership::Clock::duration by) {
  return by > Membership::Time::max() - from ? Membership::Time::max() : from + by;
}

Membership::Clock::duration times(Membership::Clock::duration duration, int factor) {
  return duration > Membership::Clock::duration::max() / factor ? Membership::Clock::duration::max()
                                                                : duration * factor;
}

}  // namespace

Membership::Membership(int workers, Clock::duration timeout, Time now)
    : timeout_(timeout),
      join_limit_(later(now, times(timeout, kOverdueFactor))),
      workers_(static_cast<std::size_t>(workers)),
      next_heartbeat_(now),
      last_look_(now) {
  LOCKSTEP_CHECK(workers > 0 && timeout > Clock::duration::zero());
}

Membership::Admission Membership::join(const WorkerCard& card, Time now) {
  if (complete()) {
    return {-1, fmt::format("the job runs already with all its {} workers; nobody can join or "
                            "come back",
                            size())};
  }
  const auto place = card.place >= 0 ? workers_.begin() + card.place
                                     : std::ranges::find(workers_, false, &Worker::present);
  LOCKSTEP_CHECK(!place->present);
  const auto worker = static_cast<int>(place - workers_.begin());
  *place = {.present = true,
            .card = card,
            .name = fmt::format("worker {} ({}, {})", worker, card.node_id, card.address),
            .last_heard = now,
            .watched = card.ours,
            .owes = {}};
  ++present_;
  return {worker, {}};
}

void Membership::forget(int worker) {
  LOCKSTEP_CHECK(at(worker).present && !complete());
  at(worker).present = false;
  --present_;
}

void Membership::watch(int worker, bool watched, Time now) {
  Worker& each = at(worker);
  if (watched && !each.watched) each.last_heard = now;
  each.watched = watched;
}

void Membership::owe(int worker, const std::string& what, Time now) {
  at(worker).owes = what;
  at(worker).owes_since = now;
}

std::optional<Error> Membership::judge(Time now) {
  for (Worker& worker : workers_) {
    worker.last_heard = excuse_own_pause(worker.last_heard, last_look_, now, timeout_);
    worker.owes_since = excuse_own_pause(worker.owes_since, last_look_, now, timeout_);
  }
  last_look_ = now;
  for (int i = 0; i < size(); ++i) {
    const Worker& worker = at(i);
    if (!worker.present) continue;
    if (worker.watched && now - worker.last_heard >= timeout_) {
      const std::string during =
          worker.owes.empty() ? "" : fmt::format(", which owes {},", worker.owes);
      return Error(ErrorCode::kPeerLost,
                   fmt::format("nothing was heard of {}{} for {}", worker.name, during,
                               format_duration(timeout_)),
                   i);
    }
    if (!worker.owes.empty() && now >= later(worker.owes_since, times(timeout_, kOverdueFactor))) {
      return Error(ErrorCode::kTimeout,
                   fmt::format("{} has not brought {} within {}", worker.name, worker.owes,
                               format_duration(times(timeout_, kOverdueFactor))),
                   i);
    }
  }
  if (!complete() && now >= join_limit_) return missing();
  return std::nullopt;
}

Error Membership::missing() const {
  std::vector<std::string> here;
  for (const Worker& worker : workers_) {
    if (worker.present) here.push_back(worker.name);
  }
  return Error(ErrorCode::kTimeout,
               fmt::format("{} of {} workers joined within {}{}", present_, size(),
                           format_duration(times(timeout_, kOverdueFactor)),
                           here.empty() ? "" : ": " + list_of(here)));
}

bool Membership::take_heartbeat(Time now) {
  if (now < next_heartbeat_) return false;
  next_heartbeat_ = later(now, timeout_ / 5);
  return true;
}

Membership::Time Membership::wake_at() const {
  Time wake = complete() ? next_heartbeat_ : std::min(next_heartbeat_, join_limit_);
  for (const Worker& worker : workers_) {
    if (!worker.present) continue;
    if (worker.watched) wake = std::min(wake, later(worker.last_heard, timeout_));
    if (!worker.owes.empty()) {
      wake = std::min(wake, later(worker.owes_since, times(timeout_, kOverdueFactor)));
    }
  }
  return wake;
}

}  // namespace lockstep

#include "lockstep/net/job/control_plane.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/index.h"
#include "lockstep/net/job/control_loop.h"
#include "lockstep/net/job/job_health.h"

namespace lockstep {

ControlPlane::ControlPlane() = default;

ControlPlane::ControlPlane(std::unique_ptr<Door> door, std::unique_ptr<Centre> centre,
                           std::string title, Deadline::Clock::duration timeout)
    : name_(std::move(title)),
      rank_(-1),
      timeout_(timeout),
      loop_(std::make_unique<ControlLoop>(latch_, progress_book_, arrivals_, std::move(door),
                                          std::move(centre))) {}

ControlPlane::~ControlPlane() = default;

RosterMessage ControlPlane::join(std::optional<Link> link, MemberOptions options) {
  const MemberId id = options.card.id;
  // The member gives up by itself, and says why.
  const Deadline deadline = Deadline::after(options.patience + std::chrono::seconds(1));
  loop_->join(std::move(link), std::move(options));
  RosterMessage message = wait_for_roster(deadline);
  rank_ = std::ranges::find(message.roster, id, &Card::id)->rank;
  name_ = name_of(message.roster[index_of(rank_)]);
  return message;
}

RosterMessage ControlPlane::wait_for_roster(Deadline deadline) {
  RosterMessage message = loop_->wait_for_roster(deadline);
  centre_ = message.centre;
  timeout_ = message.timeout;
  return message;
}

bool ControlPlane::all_left() const { return loop_ && loop_->all_left(); }

void ControlPlane::wait_until_all_left(Deadline deadline) {
  if (loop_) loop_->wait_until_all_left(deadline);
  latch_.check();
}

void ControlPlane::fail(const Error& seen) {
  latch_.check();
  if (loop_ && loop_->report(seen)) {
    // The centre decides in less than half of this; see JobHealth.
    const Deadline deadline =
        Deadline::after(std::min<Deadline::Clock::duration>(timeout_, std::chrono::seconds(1)));
    pollfd entry{latch_.fd(), POLLIN, 0};
    while (!latch_.tripped() && !deadline.expired()) ::poll(&entry, 1, deadline.poll_timeout());
  }
  if (loop_ && loop_->centre_left() && seen.rank() >= 0 && seen.rank() == centre_.rank) {
    latch_.trip(Error(ErrorCode::kPeerLost, fmt::format("{} has left the job", name_of(centre_)),
                      seen.rank()));
  }
  latch_.trip(seen);
  throw Error(*latch_.error());
}

void ControlPlane::abort(const std::string& reason) {
  if (latch_.trip(aborted_error(name_, rank_, reason)) && loop_) {
    loop_->report(Error(ErrorCode::kAborted, reason, rank_));
  }
}

}  // namespace lockstep

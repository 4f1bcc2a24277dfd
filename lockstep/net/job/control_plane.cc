#include "lockstep/net/job/control_plane.h"

#include <fmt/format.h>
#include <poll.h>

#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/net/job/control_loop.h"
#include "lockstep/net/job/job_health.h"

namespace lockstep {

ControlPlane::ControlPlane() = default;

ControlPlane::ControlPlane(std::unique_ptr<Centre> centre)
    : loop_(std::make_unique<ControlLoop>(latch_, progress_book_, std::move(centre))) {}

ControlPlane::~ControlPlane() = default;

void ControlPlane::attach(Link link, const MemberOptions& options) {
  LOCKSTEP_CHECK(!member_);
  member_ = std::make_unique<const MemberOptions>(options);
  if (!loop_) loop_ = std::make_unique<ControlLoop>(latch_, progress_book_, nullptr);
  loop_->attach(std::move(link), options);
}

void ControlPlane::fail(const Error& seen) {
  latch_.check();
  if (loop_ && loop_->report(seen)) {
    // The centre decides in less than half of this; see JobHealth.
    const Deadline deadline = Deadline::after(
        std::min<Deadline::Clock::duration>(member_->timeout, std::chrono::seconds(1)));
    pollfd entry{latch_.fd(), POLLIN, 0};
    while (!latch_.tripped() && !deadline.expired()) ::poll(&entry, 1, deadline.poll_timeout());
  }
  if (loop_ && loop_->centre_left() && seen.rank() >= 0 && seen.rank() == member_->centre.rank) {
    latch_.trip(Error(ErrorCode::kPeerLost,
                      fmt::format("{} has left the job", name_of(member_->centre)), seen.rank()));
  }
  latch_.trip(seen);
  throw Error(*latch_.error());
}

void ControlPlane::abort(const std::string& reason) {
  const std::string name = member_ ? member_->name : "rank 0";
  const int rank = member_ ? member_->rank : 0;
  if (latch_.trip(aborted_error(name, rank, reason)) && loop_) {
    loop_->report(Error(ErrorCode::kAborted, reason, rank));
  }
}

}  // namespace lockstep

#include "lockstep/net/job/arrivals.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace lockstep {
namespace {

using namespace std::chrono_literals;

// How soon a waiting thread notices that the job has failed.
constexpr auto kLatchCheck = 20ms;
// Members hold the secret, but one that errs must not use up all descriptors.
constexpr std::size_t kMostWaiting = 16384;

}  // namespace

void Arrivals::deliver(Arrival arrival) {
  {
    const std::lock_guard lock(mutex_);
    if (!arrival.original) {
      std::erase_if(waiting_, [&](const Arrival& other) {
        return !other.original && other.peer == arrival.peer && other.purpose == arrival.purpose;
      });
    }
    if (waiting_.size() >= kMostWaiting) waiting_.pop_front();
    waiting_.push_back(std::move(arrival));
    event_.set();
  }
  arrived_.notify_all();
}

std::optional<Arrival> Arrivals::next() {
  const std::lock_guard lock(mutex_);
  if (waiting_.empty()) return std::nullopt;
  Arrival arrival = std::move(waiting_.front());
  waiting_.pop_front();
  if (waiting_.empty()) event_.clear();
  return arrival;
}

std::optional<Arrival> Arrivals::take(const MemberId& id, std::uint32_t group) {
  const auto found = std::ranges::find_if(waiting_, [&](const Arrival& arrival) {
    return !arrival.original && arrival.peer.id == id && arrival.peer.group == group;
  });
  if (found == waiting_.end()) return std::nullopt;
  Arrival arrival = std::move(*found);
  waiting_.erase(found);
  if (waiting_.empty()) event_.clear();
  return arrival;
}

Arrival Arrivals::wait_for(const MemberId& id, std::uint32_t group, const std::string& name,
                           int rank, Deadline deadline, const FailureLatch& latch) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (auto arrival = take(id, group)) return std::move(*arrival);
    latch.check();
    if (deadline.expired()) {
      throw Error(ErrorCode::kTimeout, fmt::format("{} did not connect in time", name), rank);
    }
    arrived_.wait_until(lock, earlier(deadline, Deadline::after(kLatchCheck)).time());
  }
}

}  // namespace lockstep

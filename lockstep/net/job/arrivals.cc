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
constexpr std::ptrdiff_t kMostOfMember = 256;

}  // namespace

void Arrivals::deliver(Arrival arrival) {
  {
    const std::lock_guard lock(mutex_);
    if (!arrival.original) {
      std::erase_if(waiting_, [&](const Arrival& other) {
        return !other.original && other.peer == arrival.peer && other.purpose == arrival.purpose;
      });
    }
    const auto of_member = [&](const Arrival& other) {
      return !arrival.original && !other.original && other.peer.id == arrival.peer.id;
    };
    if (std::ranges::count_if(waiting_, of_member) >= kMostOfMember) {
      waiting_.erase(std::ranges::find_if(waiting_, of_member));
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

std::deque<Arrival>::iterator Arrivals::find(const Awaited& awaited) {
  return std::ranges::find_if(waiting_, [&](const Arrival& arrival) {
    return !arrival.original && arrival.peer.id == awaited.id &&
           arrival.purpose == awaited.purpose && arrival.peer.group == awaited.group &&
           arrival.peer.generation == awaited.generation;
  });
}

bool Arrivals::is_there(const Awaited& awaited) {
  const std::lock_guard lock(mutex_);
  return find(awaited) != waiting_.end();
}

std::optional<Arrival> Arrivals::take(const Awaited& awaited) {
  const auto found = find(awaited);
  if (found == waiting_.end()) return std::nullopt;
  Arrival arrival = std::move(*found);
  waiting_.erase(found);
  if (waiting_.empty()) event_.clear();
  return arrival;
}

void Arrivals::begin_generation(std::uint32_t tag) {
  const std::lock_guard lock(mutex_);
  std::erase_if(waiting_, [&](const Arrival& arrival) {
    return !arrival.original && arrival.purpose != Purpose::kServer &&
           arrival.peer.generation != tag;
  });
  if (waiting_.empty()) event_.clear();
}

Arrival Arrivals::wait_for(const Awaited& awaited, Deadline deadline, const FailureLatch& latch) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (auto arrival = take(awaited)) return std::move(*arrival);
    latch.check();
    if (deadline.expired()) {
      throw Error(ErrorCode::kTimeout, fmt::format("{} did not connect in time", awaited.name),
                  awaited.rank);
    }
    arrived_.wait_until(lock, earlier(deadline, Deadline::after(kLatchCheck)).time());
  }
}

}  // namespace lockstep

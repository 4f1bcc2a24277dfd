#include "lockstep/run/thread_meeting.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/transport/local_group.h"

namespace lockstep {

ThreadMeeting::ThreadMeeting(int world_size) : threads_(static_cast<std::size_t>(world_size)) {
  for (int rank = 0; rank < world_size; ++rank) threads_[index_of(rank)].rank = rank;
}

ThreadMeeting::Place ThreadMeeting::regroup(int thread, Deadline deadline) {
  std::unique_lock lock(mutex_);
  Member& own = threads_[index_of(thread)];
  if (own.left) {
    throw Error(ErrorCode::kTimeout,
                fmt::format("rank {} (thread) was stuck for longer than the others wait, and they "
                            "have gone on without it",
                            own.rank),
                own.rank);
  }
  own.came = true;
  const std::uint32_t awaited = generation_ + 1;
  if (all_came()) form();
  if (!formed_.wait_until(lock, deadline.time(), [&] { return generation_ >= awaited; })) {
    for (Member& member : threads_) {
      if (member.came || std::exchange(member.left, true)) continue;
      departed_.push_back({member.rank, "it did not come in time", true});
    }
    form();
  }
  return std::move(own.next);
}

void ThreadMeeting::leave(int thread, int rank, const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(threads_[index_of(thread)].left, true)) return;  // the others know
  departed_.push_back({rank, why});
  if (all_came()) form();
}

bool ThreadMeeting::all_came() const {
  const auto absent = [](const Member& member) { return !member.came && !member.left; };
  const auto here = [](const Member& member) { return member.came && !member.left; };
  return std::ranges::any_of(threads_, here) && std::ranges::none_of(threads_, absent);
}

void ThreadMeeting::form() {
  std::vector<Member*> here;
  for (Member& member : threads_) {
    if (!member.left) here.push_back(&member);
  }
  ++generation_;
  std::ranges::sort(departed_);
  auto transports = make_local_group(static_cast<int>(here.size()));
  for (std::size_t i = 0; i < here.size(); ++i) {
    here[i]->rank = static_cast<int>(i);
    here[i]->came = false;
    here[i]->next = {generation_, std::move(transports[i]), departed_};
  }
  departed_.clear();
  formed_.notify_all();
}

}  // namespace lockstep

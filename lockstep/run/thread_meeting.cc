#include "lockstep/run/thread_meeting.h"

#include <algorithm>

#include "lockstep/base/index.h"
#include "lockstep/comm/transport/local_group.h"

namespace lockstep {

ThreadMeeting::Place ThreadMeeting::regroup(int thread, Deadline deadline) {
  std::unique_lock lock(mutex_);
  Member& own = threads_[index_of(thread)];
  own.came = true;
  const std::uint32_t awaited = generation_ + 1;
  if (all_came()) form();
  if (!formed_.wait_until(lock, deadline.time(), [&] { return generation_ >= awaited; })) {
    for (Member& member : threads_) member.left = member.left || !member.came;
    form();
  }
  return std::move(own.next);
}

void ThreadMeeting::leave(int thread, int rank, const std::string& why) {
  const std::lock_guard lock(mutex_);
  threads_[index_of(thread)].left = true;
  departed_.emplace_back(rank, why);
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
    here[i]->came = false;
    here[i]->next = {generation_, std::move(transports[i]), departed_};
  }
  departed_.clear();
  formed_.notify_all();
}

}  // namespace lockstep

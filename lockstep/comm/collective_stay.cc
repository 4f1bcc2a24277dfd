#include "lockstep/comm/collective_stay.h"

namespace lockstep {

void CollectiveStay::leave_noted() {
  if (!entered_) {
    if (succeeded_) return;  // of a group of one rank
    enter();
  }
  const std::uint64_t now = recorder_.ticks();
  CollectiveEnd end{.failed = !succeeded_, .longest = {track_.waits.rank(), 0}};
  // One that failed tells whom it waited for then; others may ask for it until the end.
  if (end.longest.rank >= 0) end.longest.nanoseconds = track_.waits.waited();
  if (succeeded_ || end.longest.rank < 0) end.longest = track_.waits.take_longest();
  track_.ring.leave(number_, now, pack(end));
}

}  // namespace lockstep

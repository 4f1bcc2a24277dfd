#pragma once

#include <algorithm>

#include "lockstep/base/deadline.h"

namespace lockstep {

// For whoever judges silence by `timeout` and looks several times in it. If the last look was far
// longer ago, it was this process that stood still: whatever counts from `since` is moved on by as
// long, because nobody can have been heard meanwhile.
inline Deadline::Clock::time_point excuse_own_pause(Deadline::Clock::time_point since,
                                                    Deadline::Clock::time_point last_look,
                                                    Deadline::Clock::time_point now,
                                                    Deadline::Clock::duration timeout) {
  const auto slept = now - last_look;
  return slept > timeout / 2 ? std::min(now, since + slept) : since;
}

}  // namespace lockstep

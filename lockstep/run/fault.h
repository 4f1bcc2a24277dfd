#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "lockstep/train/replica.h"

namespace lockstep {

// For tests: LOCKSTEP_FAULT="rank=1 step=3 at=backward do=kill" makes rank 1 do something to itself
// when it comes to that place of that step: `kill`, `stop` and `crash` (SIGSEGV) send it the
// signal, `flip` flips a bit of its weights, `memory` throws std::bad_alloc, `fail` throws
// Error{kIo}. With do=slow ms=20 it waits for 20 ms each time it comes to that place, from that
// step on; at=lane is before every lane, in its time. The rank is the one of the first generation;
// -1 are workers that came later, which rank=newcomer names; rank=any are all. Null without the
// variable. Throws Error{kInvalidArgument} for what it cannot read.
std::function<void(std::string_view place, std::int64_t step)> planned_fault(int rank,
                                                                             Replica& replica);

}  // namespace lockstep

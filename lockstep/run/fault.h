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
// step on; at=lane is before every lane, in its time. step=any is the first time that it comes
// there. Places of a step: see TrainerOptions::at. Places of a regroup
// are standing (before this worker asks for the next generation; the step is the number of the one
// that ends, 0 for a newcomer), roster, ready and go (it knows the next one, can call its
// collectives, and so can all; the step is that one's number). The rank is the one of the first
// generation; -1 are workers that came later, which rank=newcomer names; rank=any are all. Several
// faults are separated by semicolons. Null without the variable, or if nothing in it is for this
// rank. `replica` is null where only a regroup's places are passed. Throws Error{kInvalidArgument}
// for what it cannot read.
std::function<void(std::string_view place, std::int64_t step)> planned_fault(int rank,
                                                                             Replica* replica);

}  // namespace lockstep

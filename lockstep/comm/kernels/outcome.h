#pragma once

#include "lockstep/comm/call.h"

namespace lockstep {

// What engines need of the kernels besides sums; of completed calls.

// The outcome of a call that has run: with check_finite, where its result on this rank is not
// finite. A rank that gets no result, because it is not the root, has nothing to look at.
Outcome outcome_of(const Call& call, int rank);

// A call in a world of one.
Outcome run_alone(const Call& call);

}  // namespace lockstep

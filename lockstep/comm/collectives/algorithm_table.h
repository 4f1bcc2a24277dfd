#pragma once

#include "lockstep/comm/call.h"

namespace lockstep {

// Whether calls of this kind can use `algorithm` in a group that has shared memory, or has none.
bool offers(Collective collective, Algorithm algorithm, bool shared_memory);

// The caller's choice if there is one, otherwise by size and world size. Throws
// Error{kInvalidArgument} for a choice that is not offered.
Algorithm choose_algorithm(const Call& call, int world_size, bool shared_memory);

}  // namespace lockstep

#pragma once

#include <string>

#include "lockstep/comm/call.h"
#include "lockstep/wire/mesh_frame.h"

namespace lockstep {

// What is checked before a call runs: whether its arguments fit together here, and whether the
// other ranks make the same call.

// Fills in what the arguments imply (total, even counts) and throws Error{kInvalidArgument,
// kInvalidRank or kSizeMismatch} if they do not fit together on this rank.
void complete_call(Call& call, int rank, int world_size);

// What all ranks must agree on, as a frame without payload; of a completed call.
MeshFrame stamp_of(const Call& call);
// "all_reduce sum f32 x 1000 (direct), step 3, bucket 2"
std::string describe(const MeshFrame& stamp);

}  // namespace lockstep

#pragma once

#include <string>

#include "lockstep/base/error.h"
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
// Why a frame that came is not the one that was expected: Error{kSizeMismatch} if they differ in
// their payload alone, else Error{kCollectiveMismatch}. `sender` and `receiver` are names; the
// error blames the rank `rank`, the sender's.
Error frame_mismatch(const MeshFrame& got, const std::string& sender, int rank,
                     const MeshFrame& expected, const std::string& receiver);

}  // namespace lockstep

#pragma once

#include <span>
#include <vector>

#include "lockstep/comm/call.h"
#include "lockstep/comm/collectives/host_map.h"
#include "lockstep/comm/scratch.h"
#include "lockstep/comm/transport/transport.h"

namespace lockstep {

// The round of a two-level reduction in which every rank sends its host's partials of the elements
// that it carries, and combines its own chunk along the canonical tree: of what the ranks of its
// host bring, which it reads in place, and of what the other hosts send. A segment is combined just
// before it is sent and as soon as it has come, so that it never leaves the cache. The temporary
// memory is two segments per partial and peer, sent or received.
struct HostReduction {
  const HostMap* hosts = nullptr;
  const HostShares* shares = nullptr;
  const HostInputs* inputs = nullptr;
  DataType type = DataType::kF32;
  ReduceOp op = ReduceOp::kSum;
  // What each rank of this host brings, whole vectors.
  std::span<const std::vector<const std::byte*>> partials;
  // Where the result goes, each with room for element `first_out` of the vector and those that
  // follow. May lie in partials, at its place.
  std::span<std::byte* const> outs;
  std::size_t first_out = 0;
  // What travels at once of all partials of a message; 0: the number of hosts decides.
  std::size_t segment_bytes = 0;

  void run(Transport& transport, Scratch& scratch, const MeshFrame& stamp, Deadline deadline) const;
};

}  // namespace lockstep

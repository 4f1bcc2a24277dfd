#pragma once

#include <span>
#include <vector>

#include "lockstep/comm/call.h"
#include "lockstep/comm/collectives/host_map.h"
#include "lockstep/comm/scratch.h"
#include "lockstep/comm/transport/transport.h"

namespace lockstep {

// The round of a two-level collective between hosts: a reduction, the gathering of its results, or
// both. Every rank sends its host's partials of the elements that it carries, and combines its own
// chunk along the canonical tree: of what the ranks of its host bring, which it reads in place, and
// of what the other hosts send. A segment is combined just before it is sent and as soon as it has
// come, so that it never leaves the cache. Results go out behind the partials, as far as they are
// combined, so that the link does not fall idle between the two. What has come of results is
// copied to all ranks of the host. The temporary memory is two segments per partial and peer, sent
// or received.
struct HostExchange {
  const HostMap* hosts = nullptr;
  const HostShares* shares = nullptr;
  DataType type = DataType::kF32;
  ReduceOp op = ReduceOp::kSum;

  // The reduction; null: there is none, and `own_chunk` is this rank's chunk of the result.
  const HostInputs* inputs = nullptr;
  // What each rank of this host brings, whole vectors.
  std::span<const std::vector<const std::byte*>> partials;
  const std::byte* own_chunk = nullptr;

  // Where the result goes, each with room for element `first_out` of the vector and those that
  // follow. May lie in partials, at its place. With `gathers` they are whole vectors, one per rank
  // of the host; without, they get this rank's chunk alone.
  std::span<std::byte* const> outs;
  std::size_t first_out = 0;
  bool gathers = true;
  // The host whose first partial of rank `root` is the whole result from the start; -1: none.
  int from_host = -1;
  int root = 0;

  // What travels at once of all partials of a message; 0: the number of hosts decides.
  std::size_t segment_bytes = 0;

  void run(Transport& transport, Scratch& scratch, const MeshFrame& stamp, Deadline deadline) const;
};

}  // namespace lockstep

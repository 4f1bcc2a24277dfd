#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "lockstep/comm/call.h"
#include "lockstep/comm/collectives/board_sync.h"
#include "lockstep/comm/collectives/host_map.h"
#include "lockstep/comm/scratch.h"
#include "lockstep/comm/transport/transport.h"

namespace lockstep {

class CollectiveStay;

// Collectives of a group on several hosts, of which one at least has several ranks. Every rank
// handles some elements for all ranks of its host: it reads and writes them in the memory of those
// ranks, and exchanges them with the other hosts, so that they cross the network once per host.
// The ranks of a host meet when they enter and when they leave, and drive the network side by side
// in between. Memory that is not of allocate() is copied to and from memory that is. One thread at
// a time.
class TwoLevelCollectives {
 public:
  // `transport` is the group's, with the number `group`, and must outlive it. `segment_bytes` as in
  // PlanOptions.
  TwoLevelCollectives(Transport& transport, HostMap hosts, std::uint32_t group,
                      std::size_t segment_bytes);
  ~TwoLevelCollectives();

  static bool supports(Collective collective);
  // Whether it can carry out this call: an entry has no room for the addresses of very many
  // partials.
  static bool supports(const Call& call, int world_size);
  Outcome run(const Call& call, const MeshFrame& stamp, CollectiveStay& stay);

  Buffer allocate(std::size_t bytes);
  void note_waits_in(WaitNote& waits);

 private:
  class Neighbours;  // the ranks of this host
  struct Task;       // the call under way

  void agree_on_hosts(const MeshFrame& stamp, Deadline deadline);
  void carry_out(const Call& call, const MeshFrame& stamp, CollectiveStay& stay);
  const HostInputs& inputs_for(const Call& call);
  void exchange(const Task& task);

  Transport& transport_;
  const HostMap hosts_;
  const int rank_;
  const int host_;
  const std::size_t segment_bytes_;
  bool agreed_ = false;
  HostInputs inputs_;         // of the last reduction
  LeafOwners inputs_owners_;  // what they are for
  Scratch windows_;
  std::unique_ptr<Neighbours> neighbours_;  // null where this rank is alone on its host
};

}  // namespace lockstep

#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/base/cuda/device_stream.h"
#include "lockstep/base/range.h"
#include "lockstep/comm/communicator.h"

namespace lockstep {

struct DeviceReducerOptions {
  LeafOwners owners;
  // NCCL's own all-reduce of the ranks' sums, in an order of its own, instead of the canonical
  // tree.
  bool native = false;
  // Elements of the whole vector that each rank is to have the sum of; empty: everybody has all.
  std::vector<std::size_t> shards = {};
  // With shards: for every rank, the ranks whose shards of the sum it is to have, its own among
  // them; neighbours, who have each other's. Empty: everybody has its own only.
  std::vector<Range> buddies = {};
  // Of the whole vector, so that no more scratch memory is taken than it needs; 0: not known.
  std::size_t elements = 0;
};

// Sums over lanes among ranks that have a GPU each, from memory of one GPU to memory of another.
// Everything is enqueued on a stream of the caller's, always the same one; nothing waits for what
// is enqueued. The first call of a kind may wait, up to the deadline, until its peers come to
// theirs and are connected. All ranks make the same calls in the same order. One thread at a time,
// whose current GPU is the one that the reducer was made on.
//
// Destroying it waits for nobody and ends what other ranks have not done yet. So they meet before
// (Communicator::barrier()) when their streams are done; after a failure there is no need.
class DeviceReducer {
 public:
  virtual ~DeviceReducer() = default;

  // Other owners of the lanes for the calls from now on, on all ranks alike. Takes no memory.
  virtual void set_owners(const LeafOwners& owners) = 0;
  // `partials` are this rank's sums over owned_nodes(owners, rank), in that order: whole vectors on
  // the device. Elements `range` of the first become the sum over all lanes (with shards: where
  // they are this rank's or its buddies'; the rest of `range` is unspecified). The others keep
  // their values.
  virtual void reduce(std::span<float* const> partials, Range range, DeviceStream stream) = 0;
  // With shards: everybody's shard of `values`, in place.
  virtual void all_gather(float* values, DeviceStream stream) = 0;

  // To be called now and then while waiting for the stream: throws when what was enqueued will
  // never be done, because a connection is broken or the job has failed. What is enqueued then
  // ends, undone, and everything that comes later throws the same.
  virtual void check() = 0;
  // Lets what is enqueued end, undone, and everything after it throw.
  virtual void abort() noexcept = 0;
};

// "2.18.5"; empty in a build without NCCL.
std::string nccl_version();

// Why sums cannot go from GPU to GPU here, in a few words, the same on every rank; nothing when
// they can. `device` is this rank's GPU, counted round those that there are. Collective.
std::optional<std::string> device_reducer_refusal(Communicator& communicator, int device);

// Over NCCL, on the calling thread's current GPU. The communicator brings the ranks together and
// tells of their deaths, and is told of NCCL's failures; it must outlive the reducer. Whatever has
// to wait for other ranks ends like the communicator's own calls: after ten times the job's
// timeout. Collective; a failure here ends the job.
std::unique_ptr<DeviceReducer> make_nccl_reducer(Communicator& communicator,
                                                 const DeviceReducerOptions& options);

}  // namespace lockstep

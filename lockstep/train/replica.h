#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/nccl/device_reducer.h"
#include "lockstep/model/batch.h"
#include "lockstep/model/gpu_model.h"
#include "lockstep/model/layout.h"
#include "lockstep/model/update.h"
#include "lockstep/train/gradient_tree.h"

namespace lockstep {

struct ReplicaOptions;

// One worker's copy of the model on a device: parameters, moments and accumulators, and all
// arithmetic on them. Flat buffers are in the order of layout(). One thread at a time.
//
// A replica outlives communicators. While it is attached to one, its accumulators are memory of
// that communicator. While it is detached it has none: only layout(), loss(), what concerns
// parameters, moments and hashes, and (after detach()) an update of the last step may be called.
class Replica {
 public:
  virtual ~Replica() = default;

  // Takes part in the exchanges of `communicator`, which must live until detach(). The replica is
  // detached. The options have the model, precision, sizes and device that it was made with.
  // Parameters stay. So do moments, unless options.shard is another range: they are zeros then,
  // until set_moments(). Collective with Exchange::kDevice.
  virtual void attach(const ReplicaOptions& options, Communicator& communicator) = 0;
  // Before the communicator goes, or after it has failed: ends what is under way on a GPU and
  // between GPUs, and gives up all memory of the communicator. Keeps parameters, shard() and its
  // moments. With shards it also keeps shard() of partial(0) until attach(): if that was the sum
  // over all lanes, update() can still be made. Idempotent. Throws only what a GPU throws that does
  // not end in time, or has failed; the replica is of no use then.
  virtual void detach() = 0;
  virtual bool attached() const = 0;

  virtual const ParameterLayout& layout() const = 0;
  // These four: only while attached.
  virtual const LaneSchedule& schedule() const = 0;
  // Between steps, on all ranks alike: this rank is `rank` of these owners. It needs no more
  // accumulators than there are. Spans of partial() are then others.
  virtual void set_owners(const LeafOwners& owners, int rank) = 0;

  // Whole flat buffers, on the host.
  virtual void set_parameters(std::span<const float> values) = 0;
  virtual void get_parameters(std::span<float> values) const = 0;
  // The elements whose moments are held here: all, or the shards of this rank and its buddies.
  virtual Range shard() const = 0;
  virtual void set_moments(std::span<const float> first, std::span<const float> second) = 0;
  virtual void get_moments(std::span<float> first, std::span<float> second) const = 0;

  virtual LossSum loss(const Batch& batch) = 0;
  // Computes lane `index` of the schedule: the gradient of the sum of its token losses goes into
  // its accumulator, then its merges are made; on a GPU, perhaps after the call has returned. Only
  // the last lane has `ready`: it is called in ascending order with ranges that are final in all
  // partials. With Exchange::kHost they can then be read through partial().
  virtual void gradient(const Batch& batch, std::size_t index, const RangeReady& ready) = 0;
  // The same with a gradient of zeros, for a lane that is left out.
  virtual void skip(std::size_t index, const RangeReady& ready) = 0;
  // Waits for the lanes that were begun since the last call; their results in that order. With
  // Exchange::kDevice it also waits for the exchange, and throws if that was not done.
  virtual std::vector<LaneResult> finish_lanes() = 0;
  // A partial on the host, to be sent. The sum over all lanes replaces partial(0).
  virtual std::span<float> partial(std::size_t index) = 0;
  // Elements `range` of partial(0) are the sum over all lanes. Other ranges may still be computed.
  virtual void reduced(Range range) = 0;

  // The gradient of one batch, on the host. Overwrites partial(0).
  virtual std::span<const float> single_gradient(const Batch& batch, LossSum& sum) = 0;

  // The sum over all lanes, on the host. Only shard() of it is valid.
  virtual std::span<const float> reduced_sum() = 0;
  // The squares of the norm blocks of that sum. `range` begins at a block.
  virtual void block_squares(Range range, std::span<double> sums) = 0;
  // AdamW on shard() with that sum; on a GPU, perhaps after the call has returned. Nothing is
  // changed when the loss of a lane since the last finish_lanes() is not finite. With other ranks
  // and Exchange::kDevice, finish_lanes() comes first: it knows whether the exchange was done.
  // While detached: with the sum that detach() has kept, and a norm in the request.
  virtual void update(const UpdateRequest& request) = 0;
  virtual UpdateResult finish_update() = 0;
  // Calls `fill` with the flat parameters, of which only shard() is up to date; it sets the others.
  virtual void complete_parameters(
      const std::function<void(std::span<float> parameters)>& fill) = 0;
  // The same from GPU to GPU, with Exchange::kDevice; otherwise returns false.
  virtual bool complete_on_device() { return false; }

  // The hashes of all tensors, in the order of layout().tensors(), as weights_hash() uses them.
  virtual std::vector<Blake3Hash> tensor_hashes() const = 0;
  // Bytes of parameters, moments and accumulators.
  virtual std::size_t state_bytes() const = 0;
};

// How the partials of the ranks become one sum.
enum class Exchange : std::uint8_t {
  kNone,    // there is only one rank
  kHost,    // by the reducer, through partial()
  kDevice,  // by the replicas, from GPU to GPU
};

struct ReplicaOptions {
  ModelConfig model;
  Precision precision = Precision::kF32;
  AdamWOptions adamw;
  int rows = 1;  // of a lane, or of a validation batch
  int context = 1;
  std::vector<Range> partials;  // as owned_nodes() returns them
  // There are so many at least, for other owners (Replica::set_owners).
  std::uint32_t accumulators = 0;
  Range shard;  // held_range()
  Exchange exchange = Exchange::kHost;
  bool recompute = false;  // activations, in the backward pass, which saves memory
  int device = 0;          // the GPU, modulo their number
  bool sharded = false;
  // For Exchange::kDevice.
  LeafOwners owners;
  bool native = false;  // NCCL's own all-reduce
  bool buddy = true;    // with `sharded`
};

// On the CPU, detached; parameters and moments are zeros. The pool must outlive it.
std::unique_ptr<Replica> make_cpu_replica(const ReplicaOptions& options, ThreadPool& pool);
// The same, attached.
std::unique_ptr<Replica> make_cpu_replica(const ReplicaOptions& options, Communicator& communicator,
                                          ThreadPool& pool);

// Makes the parts of a replica on a GPU. Tests have parts that need no GPU.
struct GpuParts {
  std::function<std::unique_ptr<GpuModel>(const GpuModelOptions&)> make_model = make_gpu_model;
  std::function<std::unique_ptr<DeviceReducer>(Communicator&, const DeviceReducerOptions&)>
      make_reducer = make_nccl_reducer;
};

// On a GPU, detached; `partials` may be empty, then it takes no accumulators yet.
std::unique_ptr<Replica> make_gpu_replica(const ReplicaOptions& options,
                                          const GpuParts& parts = {});
// The same, attached.
std::unique_ptr<Replica> make_gpu_replica(const ReplicaOptions& options, Communicator& communicator,
                                          const GpuParts& parts = {});

}  // namespace lockstep
